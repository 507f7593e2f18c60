"""A worker follows the settings of its queues within a second; a subscriber's own options replace them."""

from __future__ import annotations

import asyncio
import threading
from datetime import timedelta

import pytest

from millpond import Delivery, Millpond, Retry, State
from millpond.seam.settings import QueueSettings
from millpond.transports.database.sql.settings import warned_of
from millpond.worker.queue_settings import with_settings
from millpond.worker.subscription import subscription
from tests.triggers import execute
from tests.waiting import SOON, until
from tests.worker.conftest import became, on, working


async def handle(body: int) -> None: ...


def test_the_options_of_a_subscriber_replace_the_settings() -> None:
    settings = QueueSettings(
        queue="q", lease_us=60_000_000, retry=Retry.none(), max_crashes=0, max_deliveries=4, paused=True
    )
    plain = with_settings(subscription(["q"], handle, {}), settings)
    assert (plain.lease, plain.retry, plain.max_crashes, plain.max_deliveries) == (60, Retry.none(), None, 4)
    given = {"lease": 5, "retry": Retry.constant(1), "max_crashes": 9, "max_deliveries": None}
    own = subscription(["q"], handle, given)
    assert with_settings(own, settings) == own
    short = with_settings(subscription(["q"], handle, {"heartbeat": 9}), QueueSettings(queue="q", lease_us=3_000_000))
    assert (short.lease, short.heartbeat_s) == (3, 1)


@on("sqlite", "postgresql", "mariadb")
async def test_a_running_worker_follows_changes(pond: Millpond, url: str) -> None:
    runs: list[int] = []
    leases: list[float] = []

    @pond.subscriber("q", "other", max_poll=0.2)
    async def fail(body: int, delivery: Delivery) -> None:
        runs.append(body)
        leases.append(float(delivery.lease))
        raise ValueError

    operations = (await pond.transport).operations
    await operations.configure("q", retry=Retry.none())
    async with working(pond):
        assert (await became(pond, await pond.publish("q", 1), State.FAILED)).attempts == 1
        first = await became(pond, await pond.publish("other", 2), State.RETRYABLE)
        assert first.attempts >= 1
        await operations.configure("q", lease=77, retry=Retry.constant(0, attempts=3))
        await until(lambda: _follows(pond, 77))
        id_ = await pond.publish("q", 3)
        assert (await became(pond, id_, State.FAILED)).attempts == 3
        assert leases[-1] == 77
        # By plain SQL too.
        execute(url, "UPDATE millpond_queue SET retry_attempts = 2, lease = 66000000 WHERE name = 'q'")
        await until(lambda: _follows(pond, 66))
        assert (await became(pond, await pond.publish("q", 4), State.FAILED)).attempts == 2


def _follows(pond: Millpond, lease: float) -> bool:
    worker = pond.worker
    assert worker is not None
    (pool,) = worker._pools
    return float(pool.of("q").lease) == lease


WRONG = {
    "lease": "9000000000000000000",
    "max_deliveries": "2000000",
    "max_crashes": "-1",
    "retry_initial": "9000000000000000000",
    "retry_multiplier": "0.5",
    "keep_completed": "9000000000000000000",
}
WRONG_FOR_SQLITE = {
    "lease": "'60s'",
    "max_deliveries": "'x'",
    "max_crashes": "2.5",
    "retry_initial": "'soon'",
    "keep_completed": "'7d'",
}


@on("sqlite", "postgresql", "mariadb")
async def test_sql_cannot_store_a_setting_that_no_worker_can_use(pond: Millpond, url: str) -> None:
    await (await pond.transport).operations.configure("q", lease=60)
    wrong = [*WRONG.items(), *(WRONG_FOR_SQLITE.items() if url.startswith("sqlite") else [])]
    for column, value in wrong:
        with pytest.raises(Exception, match=r"(?i)constraint"):
            execute(url, f"UPDATE millpond_queue SET {column} = {value} WHERE name = 'q'")


@pytest.mark.parametrize("wrong", [WRONG, WRONG_FOR_SQLITE], ids=["numbers", "texts"])
@on("sqlite")
async def test_a_wrong_setting_has_no_effect_and_ends_no_worker(
    pond: Millpond, url: str, wrong: dict[str, str], caplog: pytest.LogCaptureFixture
) -> None:
    @pond.subscriber("q", max_poll=0.1)
    async def handle(body: int) -> None: ...

    operations = (await pond.transport).operations
    await operations.configure("q", lease=60)

    warned_of.cache_clear()
    async with working(pond):
        for column, value in wrong.items():
            execute(
                url,
                "PRAGMA ignore_check_constraints = 1",
                f"UPDATE millpond_queue SET {column} = {value}, retry_attempts = 5 WHERE name = 'q'",
            )
            line = f"setting {'retry' if column.startswith('retry') else column} of the queue 'q' has no effect"
            await until(lambda line=line: line in caplog.text)
        await became(pond, await pond.publish("q", 1), State.COMPLETED)
    async with working(pond):  # a new one begins with them
        await became(pond, await pond.publish("q", 2), State.COMPLETED)
    assert await operations.settings() == [QueueSettings(queue="q")]
    told = [record.getMessage() for record in caplog.records if "has no effect" in record.getMessage()]
    assert len(told) == len(set(told)) >= 5


@on("memory")
async def test_a_limit_of_deliveries_with_the_queue(pond: Millpond) -> None:
    @pond.subscriber("q", retry=Retry.constant(0))
    async def fail(body: int) -> None:
        raise ValueError

    async with pond.testing(raise_errors=False) as test:
        await (await pond.transport).operations.configure("q", max_deliveries=2)
        await pond.publish("q", 1)
        await test.run()
        (message,) = await test.messages("q")
    assert (message.reason, message.attempts) == ("max_deliveries", 2)


@on("memory", "sqlite")
async def test_a_worker_measures_its_silence_by_the_shortest_lease_of_its_queues(pond: Millpond) -> None:
    @pond.subscriber("q", "other")
    async def handle(body: int) -> None: ...

    operations = (await pond.transport).operations
    await operations.configure("other", lease=2)
    async with working(pond):
        worker = pond.worker
        assert worker is not None and worker._heartbeat is not None
        heartbeat, (pool,) = worker._heartbeat, worker._pools
        assert heartbeat._least_lease == 2
        assert pool.shortest.heartbeat_s < 1
        await operations.configure("q", lease=1)
        await until(lambda: heartbeat._least_lease == 1)
        assert [float(pool.of(queue).lease) for queue in ("q", "other")] == [1, 2]


@on("memory")
async def test_a_lease_that_is_extended_follows_the_queue(pond: Millpond) -> None:
    """A handler that runs for longer than the queue's lease is not started a second time."""
    runs: list[int] = []

    @pond.subscriber("q", max_workers=2, max_poll=0.1)
    async def handle(body: int) -> None:
        runs.append(body)
        await asyncio.sleep(1.2)

    await (await pond.transport).operations.configure("q", lease=0.6)
    async with working(pond):
        await became(pond, await pond.publish("q", 1), State.COMPLETED)
    assert runs == [1]


@on("memory")
async def test_the_next_attempt_of_a_hung_thread_waits_for_the_lease_of_its_queue(pond: Millpond) -> None:
    release = threading.Event()

    @pond.subscriber("q", timeout=0.1)
    def handle(body: int) -> None:
        release.wait(SOON)

    await (await pond.transport).operations.configure("q", lease=3600, retry=Retry.constant(0))
    async with working(pond):
        found = await became(pond, await pond.publish("q", 1), State.RETRYABLE)
        release.set()
    assert found.due_at - found.created_at > timedelta(minutes=50)
