"""A worker that cannot progress logs it, and leaves its unstarted messages to others."""

import asyncio
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import psycopg
import pymysql
import pytest

from millpond import Capability, Delivery, Millpond, Retry, State
from millpond.errors import WorkerStuck
from millpond.worker import handler_pool
from tests.rooms.transactions.callers import address
from tests.triggers import failing_beside, id_literal
from tests.waiting import SOON, until
from tests.worker.conftest import became, counts, drained, on, row, working
from tests.worker.test_locked_rows import locked

pytestmark = pytest.mark.slow_on_servers


@pytest.fixture(autouse=True)
def soon_stalled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Messages that are given back too early, on a busy machine, are taken again, uncounted."""
    monkeypatch.setattr(handler_pool, "_STALLED_AFTER", STALLED_AFTER)


STALLED_AFTER = 0.3


async def test_unstarted_messages_behind_hung_threads_go_back(
    make_pond: Callable[..., Millpond], caplog: pytest.LogCaptureFixture
) -> None:
    """Another worker handles them, uncounted; the stuck one is not ready and logs an error."""
    stuck, healthy = make_pond(), make_pond()
    release, hung = threading.Event(), []

    @stuck.subscriber("q", lease=30, timeout=0.5, max_workers=2, retry=Retry.constant(600))
    def hang(body: str) -> None:
        hung.append(body)
        release.wait(SOON)

    @healthy.subscriber("q", lease=30, max_workers=2)
    async def handle(body: str, delivery: Delivery) -> None: ...

    ids = await stuck.publish_many("q", [f"{n}" for n in range(20)])
    try:
        async with working(stuck):
            assert stuck.worker is not None
            await until(lambda: len(hung) == 2)
            pool = stuck.worker._pools[0]
            pool.take(await pool.transport.claim(["q"], 18, 30))
            await until(lambda: pool.stuck == 2)
            await until(lambda: not stuck.worker.ready)
            assert "hang beyond their timeout" in caplog.text
            async with working(healthy):
                waiting = [id_ for n, id_ in enumerate(ids) if f"{n}" not in hung]
                # Sooner than a lease: they were given back and did not lapse.
                rows = [await became(healthy, id_, State.COMPLETED) for id_ in waiting]
            assert {(r.deliveries, r.attempts) for r in rows} == {(1, 1)}
            assert stuck.worker.in_flight == 0
            release.set()
            await until(lambda: stuck.worker.ready)
    finally:
        release.set()


async def test_unstarted_messages_behind_async_handlers_that_never_end_go_back(pond: Millpond) -> None:
    """Without a timeout too. The handlers keep their leases."""
    forever, started = asyncio.Event(), []

    @pond.subscriber("q", max_workers=2, timeout=None)
    async def handle(body: int) -> None:
        started.append(body)
        await forever.wait()

    ids = await pond.publish_many("q", range(10))
    async with working(pond):
        assert pond.worker is not None
        await until(lambda: len(started) == 2)
        pool = pond.worker._pools[0]
        pool.take(await pool.transport.claim(["q"], 8, 30))

        async def went_back() -> bool:
            return await counts(pond) == {State.PROCESSING: 2, State.PENDING: 8}

        await until(went_back)
        assert sorted([(await row(pond, id_)).deliveries for id_ in ids]) == [0] * 8 + [1] * 2
        await until(lambda: pond.worker.in_flight == 2)
        assert pond.worker.ready, "a handler within its timeout makes progress"
        forever.set()
        assert await drained(pond) == {State.COMPLETED: 10}


@on("sqlite", "postgresql", "mariadb")
async def test_unstarted_messages_go_back_without_one_that_the_database_refuses(pond: Millpond, url: str) -> None:
    forever, started = asyncio.Event(), []

    @pond.subscriber("q", max_workers=2, timeout=None)
    async def handle(body: int) -> None:
        started.append(body)
        await forever.wait()

    ids = await pond.publish_many("q", range(10))
    async with working(pond):
        assert pond.worker is not None
        await until(lambda: len(started) == 2)
        bad = next(id_ for n, id_ in enumerate(ids) if n not in started)
        pool = pond.worker._pools[0]
        refuses = f"ROW.id = {id_literal(url, bad)} AND ROW.state = 'PENDING'"
        async with failing_beside(url, "UPDATE", "millpond_message", refuses):
            pool.take(await pool.transport.claim(["q"], 8, 30))

            async def went_back() -> bool:
                return await counts(pond) == {State.PROCESSING: 3, State.PENDING: 7}

            await until(went_back)
            await until(lambda: pond.worker.in_flight <= 3)
        forever.set()


@on("sqlite", "postgresql", "mariadb")
async def test_unstarted_messages_go_back_while_a_handler_blocks_the_event_loop(
    make_pond: Callable[..., Millpond],
) -> None:
    """The heartbeat's thread gives them back: the worker itself can do nothing."""
    blocked, healthy = make_pond(), make_pond()
    release, handled = threading.Event(), []
    started, block_now = asyncio.Event(), asyncio.Event()
    assert Capability.SHARED in (await blocked.transport).capabilities

    @blocked.subscriber("q", max_workers=1, lease=60, timeout=None)
    async def block(body: int) -> None:
        started.set()
        await block_now.wait()
        release.wait(SOON)

    @healthy.subscriber("q", max_workers=1, lease=60)
    async def handle(body: int, delivery: Delivery) -> None:
        handled.append((body, delivery.claim.deliveries))

    def work_beside() -> None:
        async def work() -> None:
            async with working(healthy):
                await until(lambda: len(handled) == 5)
            opening = healthy._connections._opening.pop(asyncio.get_running_loop())
            await (await opening).close()

        try:
            asyncio.run(work())
        finally:
            release.set()

    async with working(blocked):
        assert blocked.worker is not None
        await blocked.publish_many("q", range(6))
        await started.wait()
        pool = blocked.worker._pools[0]
        pool.take(await pool.transport.claim(["q"], 5, 60))
        threading.Thread(target=work_beside, daemon=True).start()
        block_now.set()
        assert await drained(blocked) == {State.COMPLETED: 6}
    assert sorted(handled) == [(n, 1) for n in range(1, 6)]


async def test_a_batch_that_gathers_is_not_stalled(pond: Millpond) -> None:
    got: list[int] = []

    @pond.subscriber("q", batch=10, gather=3 * STALLED_AFTER)
    async def handle(bodies: list[int]) -> None:
        got.append(len(bodies))

    ids = await pond.publish_many("q", range(3))
    async with working(pond):
        rows = [await became(pond, id_, State.COMPLETED) for id_ in ids]
    assert got == [3]
    assert {r.deliveries for r in rows} == {1}


@on("postgresql", "mariadb")
async def test_a_worker_whose_result_is_not_written_for_a_lease_is_not_ready(pond: Millpond, url: str) -> None:
    started, finish = asyncio.Event(), asyncio.Event()

    @pond.subscriber("q", lease=2)
    async def handle(body: int) -> None:
        started.set()
        await finish.wait()

    async with working(pond):
        worker = pond.worker
        assert worker is not None
        id_ = await pond.publish("q", 1)
        await started.wait()
        with locked(url, id_):
            assert worker.ready
            finish.set()
            await until(lambda: worker.obstacle == "a result cannot be written")
            assert not worker.ready
        await until(lambda: worker.ready)


@on("postgresql", "mariadb")
async def test_a_worker_whose_claims_do_not_succeed_for_a_lease_is_not_ready(pond: Millpond, url: str) -> None:
    @pond.subscriber("q", lease=2)
    async def handle(body: int) -> None: ...

    async with working(pond):
        worker = pond.worker
        assert worker is not None and worker.ready
        # In a thread: a transaction of the worker, which this event loop must end, may hold the table.
        lock = locked_table(url)
        await asyncio.to_thread(lock.__enter__)
        try:
            await until(lambda: worker.obstacle == "no claim from q succeeds")
            assert not worker.ready
        finally:
            lock.__exit__(None, None, None)
        await until(lambda: worker.ready)
        await became(pond, await pond.publish("q", 1), State.COMPLETED)


@contextmanager
def locked_table(url: str) -> Iterator[None]:
    """No other session can use the table of messages while the context lasts."""
    connection: Any
    if url.startswith("postgres"):
        connection, lock, unlock = psycopg.connect(url), "LOCK TABLE millpond_message", "ROLLBACK"
    else:
        connection, lock, unlock = (
            pymysql.connect(**address(url)),
            "LOCK TABLES millpond_message WRITE",
            "UNLOCK TABLES",
        )
    with connection, connection.cursor() as cursor:
        cursor.execute(lock)
        yield
        cursor.execute(unlock)


@on("memory", "sqlite")
async def test_a_worker_may_end_when_all_handlers_hang(pond: Millpond, caplog: pytest.LogCaptureFixture) -> None:
    """Threads cannot be ended: only a new process gets rid of them."""
    release = threading.Event()

    @pond.subscriber("q", max_workers=1, timeout=0.2, lease=1)
    def hang(body: int) -> None:
        release.wait(SOON)

    await pond.publish("q", 1)
    try:
        with pytest.raises(WorkerStuck, match="all 1 handlers of"):
            await pond.run(signals=False, graceful_timeout=0.1, end_when_stuck=True)
    finally:
        release.set()
    assert "hang beyond their timeout" in caplog.text


@on("memory")
async def test_a_worker_whose_async_handlers_swallow_their_timeout_is_not_ready(pond: Millpond) -> None:
    release = asyncio.Event()

    @pond.subscriber("q", max_workers=1, timeout=0.2)
    async def handle(body: int) -> None:
        while not release.is_set():
            with suppress(asyncio.CancelledError):
                await release.wait()

    async with working(pond):
        worker = pond.worker
        assert worker is not None
        await pond.publish("q", 1)
        await until(lambda: worker.obstacle is not None and "hang" in worker.obstacle)
        release.set()
        await until(lambda: worker.ready)


class Panic(BaseException):
    """An error of a library that is no `Exception`."""


@on("memory", "sqlite")
async def test_a_worker_whose_heartbeat_ends_raises(pond: Millpond, monkeypatch: pytest.MonkeyPatch) -> None:
    """It would only idle: without a heartbeat it claims nothing. A handler that runs may finish."""
    began, release = asyncio.Event(), asyncio.Event()

    @pond.subscriber("q")
    async def handle(body: int) -> None:
        began.set()
        await release.wait()

    async def panic(*_: Any) -> None:
        raise Panic("no memory")

    id_ = await pond.publish("q", 1)
    with pytest.raises(WorkerStuck, match=r"heartbeat .*Panic: no memory"):
        async with working(pond):
            await began.wait()
            worker = pond.worker
            assert worker is not None and worker._heartbeat is not None
            monkeypatch.setattr(worker._heartbeat._leases, "keep", panic)
            await until(lambda: worker.stopping.is_set() and not worker.ready)
            release.set()
            await until(lambda: pond.worker is None)
    await became(pond, id_, State.COMPLETED)


@on("sqlite")
async def test_a_worker_whose_heartbeat_is_cancelled_raises(pond: Millpond) -> None:
    @pond.subscriber("q")
    async def handle(body: int) -> None: ...

    with pytest.raises(WorkerStuck, match=r"heartbeat .*it was cancelled"):
        async with working(pond):
            worker = pond.worker
            assert worker is not None
            heartbeat = worker._heartbeat
            assert heartbeat is not None
            await until(lambda: heartbeat._beat_loop)
            assert heartbeat._beat_loop is not None and heartbeat._task is not None
            heartbeat._beat_loop.call_soon_threadsafe(heartbeat._task.cancel)
            await until(lambda: worker.stopping.is_set())
            assert not worker.ready


@on("sqlite")
async def test_a_worker_whose_reaper_ends_raises(pond: Millpond, monkeypatch: pytest.MonkeyPatch) -> None:
    @pond.subscriber("q")
    async def handle(body: int) -> None: ...

    async def panic() -> int:
        raise Panic("no memory")

    transport: Any = await pond.transport
    monkeypatch.setattr(transport.workers, "reap", panic)
    with pytest.raises(Panic):
        await pond.run(signals=False, graceful_timeout=1)
