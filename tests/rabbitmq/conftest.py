"""A transport on a new virtual host, with the broker's real clock."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

import millpond
from millpond import Claim, Row
from millpond.control import Control
from millpond.message import State
from tests.shared import KINDS, empty_database

SOON = 30.0
"""Timeout in seconds. Expected events take a few seconds, even on a busy machine."""


@pytest.fixture
async def transport(rabbitmq_url: str) -> AsyncIterator[Any]:
    transport = await millpond.connect(rabbitmq_url)
    yield transport
    await transport.close()


@pytest.fixture(params=KINDS)
def archive_url(request: pytest.FixtureRequest) -> str:
    """A migrated database without messages, of each kind in turn."""
    return empty_database(request, request.param)


async def next_claim(transport: Any, queue: str = "q", within: float = SOON) -> Claim:
    """Wait for the next message and claim it."""
    async with asyncio.timeout(within):
        while not (claims := await transport.claim([queue])):
            await transport.wait([queue], within)
    return claims[0]


async def dead_letters(control: Control, queue: str = "q") -> list[Row]:
    """Wait until the queue has dead letters."""
    async with asyncio.timeout(SOON):
        while True:
            if rows := await control.messages(queue, states=[State.FAILED]):
                return rows
