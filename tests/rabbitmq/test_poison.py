"""Messages that kill their workers are stopped, by the broker's count and ours; their neighbours are not."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import Any

import pytest

import millpond
from millpond import Ack, Message
from millpond.control import Control
from millpond.outcome import MAX_CRASHES, SUSPECT
from tests.rabbitmq.conftest import SOON, arrival


@pytest.fixture(params=["quorum", "classic"])
async def transport(request: pytest.FixtureRequest, rabbitmq_url: str) -> AsyncIterator[Any]:
    """On both kinds of queues: one counts what crashed consumers were sent, for the other we do."""
    transport = await millpond.connect(rabbitmq_url, queue_type=request.param)
    yield transport
    await transport.close()


def crash(transport: Any) -> None:
    """What this handle had goes back, as if its process had died."""
    for channel in list(transport._sources["q"]._channels):
        channel.deprive()


async def claim_again_and_again(transport: Any) -> None:
    while True:
        await transport.claim(["q"], 3)


@pytest.mark.parametrize("limit", ["max_crashes", "max_deliveries"])
async def test_past_a_limit_it_is_dead_lettered_unhandled(transport: Any, limit: str) -> None:
    """FS-C5"""
    await transport.publish([Message(queue="q", payload=b"poison")])
    for n in range(2):
        claim = await arrival(transport)
        assert (claim.deliveries, claim.attempts) == (n + 1, 0)
        crash(transport)
    async with asyncio.timeout(SOON):
        while not (rows := await Control(transport).messages("q")):
            assert await transport.claim(["q"], **{limit: 2}) == []
    (row,) = rows
    assert (row.reason, row.deliveries, row.attempts) == (limit, 3, 0)


async def test_a_poison_has_as_many_runs_as_it_may(transport: Any) -> None:
    await transport.publish([Message(queue="q", payload=b"poison")])
    for n in range(MAX_CRASHES):
        assert (await arrival(transport)).unfinished == n
        crash(transport)
    async with asyncio.timeout(SOON):
        while not (rows := await Control(transport).messages("q")):
            assert await transport.claim(["q"]) == []
    assert [(row.payload, row.reason) for row in rows] == [(b"poison", "max_crashes")]


async def test_crashes_beside_a_suspect_do_not_count_against_it(transport: Any) -> None:
    """A suspect that the broker sends among others is moved aside; workers that die before it is are not its doing"""
    await transport.publish([Message(queue="q", payload=b"%d" % n) for n in range(3)])
    for _ in range(SUSPECT):
        for _ in range(3):
            await arrival(transport)
        crash(transport)
    for _ in range(MAX_CRASHES):
        dying: Any = await millpond.connect(transport.url.raw, queue_type=transport.options.queue_type)
        moving = asyncio.Event()

        async def never(parcels: Sequence[Any], moving: asyncio.Event = moving) -> None:
            moving.set()
            await asyncio.Event().wait()

        dying.publisher.send = never
        claiming = asyncio.create_task(claim_again_and_again(dying))
        await asyncio.wait_for(moving.wait(), SOON)
        crash(dying)
        claiming.cancel()
        await dying.close()
    for _ in range(3):
        claim = await arrival(transport)
        assert claim.unfinished == SUSPECT
        assert await transport.settle([Ack(claim.receipt)]) == []
    assert await Control(transport).messages("q") == []
