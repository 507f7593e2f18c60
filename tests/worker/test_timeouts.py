"""A handler that exceeds its timeout has failed: an async one is cancelled, one in a thread is flagged."""

import asyncio
import contextlib
import logging
import sqlite3
import threading
import time
from collections.abc import Generator

import pytest

from millpond import Delivery, Handling, LeaseLost, Millpond, Retry, SnoozeMessage, State
from tests.triggers import path
from tests.waiting import SOON, until
from tests.worker.conftest import became, counts, on, row, working

pytestmark = pytest.mark.slow_on_servers

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
    assert (await row(pond, healthy)).state is State.COMPLETED, "the slot runs the next message"


@on("memory", "postgresql")
async def test_a_thread_is_flagged_and_occupies_its_slot_until_it_ends(
    pond: Millpond, caplog: pytest.LogCaptureFixture
) -> None:
    """The thread runs on, but its decision is refused, and at most max_workers run."""
    flagged, late, release = threading.Event(), [], threading.Event()
    started = []

    @pond.subscriber("q", max_workers=1, timeout=1, retry=AGAIN)
    def handle(body: int, delivery: Delivery) -> None:
        started.append(body)
        if body == 2:
            return
        while not delivery.interrupted:
            time.sleep(0.005)
        flagged.set()
        release.wait(SOON)
        try:
            delivery.ack_sync()
        except LeaseLost as e:
            late.append(e)

    async with working(pond):
        hung = await pond.publish("q", 1)
        found = await became(pond, hung, State.RETRYABLE)
        assert found.error == "TimeoutError: the handler ran longer than 1 s"
        assert flagged.wait(SOON)
        second = await pond.publish("q", 2)
        assert pond.worker is not None
        assert pond.worker._pools[0].stuck == 1
        assert started == [1]
        assert (await row(pond, second)).state is State.PENDING, "left for others"
        release.set()
        await became(pond, second, State.COMPLETED)
        await until(lambda: late)
    assert (await row(pond, hung)).state is State.RETRYABLE
    assert "runs on" in caplog.text


@on("memory", "sqlite", "postgresql", "mariadb")
async def test_the_next_attempt_of_a_hung_thread_waits_for_a_lease(pond: Millpond) -> None:
    """Two threads must not run one message at once; the retry policy alone would start the second at once."""
    began: list[float] = []
    release = threading.Event()

    @pond.subscriber("q", max_workers=2, lease=4, timeout=0.5, retry=Retry.constant(0))
    def handle(body: int, delivery: Delivery) -> None:
        began.append(time.monotonic())
        if len(began) == 1:
            release.wait(SOON)

    async with working(pond):
        id_ = await pond.publish("q", 1)
        found = await became(pond, id_, State.RETRYABLE)
        assert (found.attempts, found.error) == (1, "TimeoutError: the handler ran longer than 0.5 s")
        await became(pond, id_, State.COMPLETED)
        release.set()
    assert began[1] - began[0] > 4


@on("sqlite")
@pytest.mark.parametrize(
    ("how", "state", "error"),
    [
        ("raise", State.RETRYABLE, "ValueError: out of stock"),
        ("roll back", State.RETRYABLE, "RolledBack: "),
        ("snooze", State.PENDING, ""),
    ],
)
async def test_a_message_whose_middleware_hangs_in_the_thread_runs_again_after_a_lease(
    pond: Millpond, url: str, how: str, state: State, error: str
) -> None:
    tears_down, release = threading.Event(), threading.Event()

    @pond.middleware
    def hangs(handling: Handling) -> Generator[None, BaseException | None, None]:
        yield
        tears_down.set()
        release.wait(SOON)

    @pond.subscriber("q", max_workers=2, lease=600, retry=AGAIN)
    def handle(body: int, delivery: Delivery) -> None:
        if how == "raise":
            raise ValueError("out of stock")
        if how == "snooze":
            raise SnoozeMessage(1)
        with contextlib.closing(sqlite3.connect(path(url), timeout=SOON)) as connection:
            delivery.ack_sync(within=connection)
            connection.rollback()

    async with working(pond):
        id_ = await pond.publish("q", 1)
        await until(tears_down.is_set)
        assert pond.worker is not None
        for slot in pond.worker._pools[0]._slots:
            slot.interrupt("timeout")
        found = await became(pond, id_, state)
        release.set()
    assert (found.error or "").startswith(error)
    assert found.due_us - found.created_us > 599_000_000


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
    assert sum(record.exc_info is not None for record in caplog.records) == 1, "one traceback per batch"


@on("memory")
async def test_no_timeout(pond: Millpond) -> None:
    @pond.subscriber("q", timeout=None)
    async def handle(body: int) -> None:
        await asyncio.sleep(0.01)

    id_ = await pond.publish("q", 1)
    await pond.run(until_idle=True, signals=False)
    assert (await row(pond, id_)).state is State.COMPLETED
