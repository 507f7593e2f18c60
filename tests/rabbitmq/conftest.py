"""A broker whose own clock runs; a handle on a virtual host of its own."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

import millpond
from millpond import Claim, Row
from millpond.control import Control
from millpond.message import State

SOON = 30.0
"""Nobody waits this long: what is to come comes in seconds, also on a busy machine."""


@pytest.fixture
async def transport(rabbitmq_url: str) -> AsyncIterator[Any]:
    transport = await millpond.connect(rabbitmq_url)
    yield transport
    await transport.close()


async def arrival(transport: Any, queue: str = "q", within: float = SOON) -> Claim:
    """The next message, whenever it comes."""
    async with asyncio.timeout(within):
        while not (claims := await transport.claim([queue])):
            await transport.wait([queue], within)
    return claims[0]


async def dead_letters(control: Control, queue: str = "q") -> list[Row]:
    """As soon as there are some."""
    async with asyncio.timeout(SOON):
        while True:
            if rows := await control.messages(queue, states=[State.FAILED]):
                return rows
