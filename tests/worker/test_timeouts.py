"""A handler that runs too long has failed: an async one is cancelled, a thread is told."""

import asyncio
import logging
import threading
import time

import pytest

from millpond import Delivery, LeaseLost, Millpond, Retry, State
from tests.waiting import SOON, until
from tests.worker.conftest import became, counts, on, row, working

AGAIN = Retry.constant(60)


async def test_an_async_handler_is_cancelled_and_retried(pond: Millpond) -> None:
    cleaned = []

    @pond.subscriber("q", timeout=0.1, retry=AGAIN)
    async def handle(body: int) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            cleaned.append(body)

    async with working(pond):
        id_ = await pond.publish("q", 1)
        found = await became(pond, id_, State.RETRYABLE)
    assert cleaned == [1]
    assert (found.attempts, found.deliveries) == (1, 1)
    assert found.error == "TimeoutError: the handler ran longer than 0.1 s"


@on("memory")
async def test_a_handler_that_swallows_its_cancellation_has_failed_all_the_same(pond: Millpond) -> None:
    @pond.subscriber("q", max_workers=1, timeout=0.5, retry=Retry.none())
    async def handle(body: str) -> None:
        if body == "swallow":
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                return
        if body == "raise":
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                raise ValueError("while it was cancelled") from None

    swallowed, raised, healthy = await pond.publish_many("q", ["swallow", "raise", "healthy"])
    await pond.run(until_idle=True, signals=False)
    for id_ in (swallowed, raised):
        assert "ran longer" in ((await row(pond, id_)).error or "")
    assert (await row(pond, healthy)).state is State.COMPLETED, "the runner goes on"


@on("memory", "postgresql")
async def test_a_thread_is_told_and_its_place_is_taken_until_it_ends(
    pond: Millpond, caplog: pytest.LogCaptureFixture
) -> None:
    """FS-D18: it runs on, but what it says is no longer heard, and no more than max_workers ever run."""
    told, late, release = threading.Event(), [], threading.Event()
    started = []

    @pond.subscriber("q", max_workers=1, timeout=1, retry=AGAIN)
    def handle(body: int, delivery: Delivery) -> None:
        started.append(body)
        if body == 2:
            return
        while not delivery.interrupted:
            time.sleep(0.005)
        told.set()
        release.wait(SOON)
        try:
            delivery.ack_sync()
        except LeaseLost as e:
            late.append(e)

    async with working(pond):
        hung = await pond.publish("q", 1)
        found = await became(pond, hung, State.RETRYABLE)
        assert found.error == "TimeoutError: the handler ran longer than 1 s"
        assert told.wait(SOON)
        second = await pond.publish("q", 2)
        assert pond.worker is not None
        assert pond.worker._attempts[0].stuck == 1
        assert started == [1]
        assert (await row(pond, second)).state is State.PENDING, "left for others"
        release.set()
        await became(pond, second, State.COMPLETED)
        await until(lambda: late)
    assert (await row(pond, hung)).state is State.RETRYABLE
    assert "runs on" in caplog.text


@on("memory")
async def test_a_decision_by_hand_stands_when_the_time_is_over(pond: Millpond) -> None:
    @pond.subscriber("q", timeout=0.5)
    async def handle(body: int, delivery: Delivery) -> None:
        await delivery.ack()
        await asyncio.Event().wait()

    id_ = await pond.publish("q", 1)
    await pond.run(until_idle=True, signals=False)
    assert (await row(pond, id_)).state is State.COMPLETED


@on("memory")
async def test_a_batch_that_runs_too_long_fails_as_far_as_it_is_undecided(
    pond: Millpond, caplog: pytest.LogCaptureFixture
) -> None:
    @pond.subscriber("q", batch=10, timeout=0.5, retry=AGAIN)
    async def handle(bodies: list[int], deliveries: list[Delivery]) -> None:
        await deliveries[0].ack()
        await asyncio.Event().wait()

    await pond.publish_many("q", range(4))
    with caplog.at_level(logging.ERROR):
        await pond.run(until_idle=True, signals=False)
    assert await counts(pond) == {State.COMPLETED: 1, State.RETRYABLE: 3}
    assert sum(record.exc_info is not None for record in caplog.records) == 1, "one traceback for the whole batch"


@on("memory")
async def test_no_timeout(pond: Millpond) -> None:
    @pond.subscriber("q", timeout=None)
    async def handle(body: int) -> None:
        await asyncio.sleep(0.01)

    id_ = await pond.publish("q", 1)
    await pond.run(until_idle=True, signals=False)
    assert (await row(pond, id_)).state is State.COMPLETED
