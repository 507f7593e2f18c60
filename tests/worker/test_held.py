"""A worker's row holds its claims: message rows do not change while handlers run, and nothing stays held for ever."""

import asyncio
import contextlib
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
from sqlalchemy import text

import millpond
from millpond import Delivery, Message, Millpond, Retry, State, StoreUnavailable
from millpond.transports.database.store import DatabaseStore
from millpond.transports.database.workers.workers import DatabaseWorkers
from millpond.worker import heartbeat as heartbeat_module
from millpond.worker import worker as worker_module
from millpond.worker.leases import HeldLeases
from servers import Proxy
from tests.triggers import execute, failing, failing_beside, id_literal
from tests.waiting import SOON, until
from tests.worker.conftest import became, counts, drained, on, row, working
from tests.worker.test_side_list import BAD_DATA, refusing
from tests.worker.test_within import Database

pytestmark = pytest.mark.slow_on_servers

LEASE = 2.0
SHORT = 0.5
"""A lease that may end on a busy machine before the next beat: where no other worker could take the message."""
BEATS = "SELECT beats FROM millpond_worker"
DETACHED = "SELECT count(*) FROM millpond_message WHERE lease_until IS NOT NULL"
databases = on("sqlite", "postgresql", "mariadb")
servers = on("postgresql", "mariadb")


@pytest.fixture
def quick_beats(monkeypatch: pytest.MonkeyPatch) -> None:
    """Twenty beats a second."""
    monkeypatch.setattr(heartbeat_module, "BEAT_EVERY", 0.05)


@databases
@pytest.mark.parametrize(
    "count", [500, pytest.param(50_000, marks=[pytest.mark.slow, pytest.mark.long, pytest.mark.timeout(900)])]
)
async def test_message_rows_do_not_change_while_handlers_run(
    pond: Millpond, url: str, count: int, quick_beats: None
) -> None:
    """For three leases every update of a message fails. One row is written by each beat, and no lease is lost."""
    started, finish = 0, asyncio.Event()

    @pond.subscriber("q", max_workers=count, fetch=5000, lease=SHORT, timeout=None)
    async def handle(body: int) -> None:
        nonlocal started
        started += 1
        await finish.wait()

    for first in range(0, count, 5000):
        await pond.publish_many("q", range(first, min(first + 5000, count)))
    async with working(pond, graceful_timeout=300), releasing(finish):
        await until(lambda: started == count, within=3 * SOON)
        async with failing_beside(url, "UPDATE", "millpond_message"):
            ((beats,),) = execute(url, BEATS)
            await asyncio.sleep(3 * SHORT)
            await until(lambda: execute(url, BEATS)[0][0] > beats + 3)
        assert execute(url, "SELECT count(*) FROM millpond_message WHERE lease_until IS NULL AND deliveries = 1") == [
            (count,)
        ]
        finish.set()
        assert await drained(pond, within=3 * SOON) == {State.COMPLETED: count}
        assert pond.worker is not None and pond.worker.lost == 0
    assert started == count


@servers
@pytest.mark.parametrize("level", ["REPEATABLE READ", "SERIALIZABLE"])
async def test_an_ack_within_a_long_transaction_of_a_high_isolation_level(
    pond: Millpond, url: str, level: str, quick_beats: None
) -> None:
    """It succeeds at the first attempt, after any number of beats."""
    database = Database(url)
    results: list[str] = []

    @pond.subscriber("q", lease=SHORT, retry=Retry.none())
    async def handle(body: int, delivery: Delivery) -> None:
        async with database.session() as session:
            await session.connection(execution_options={"isolation_level": level})
            await session.execute(text("SELECT count(*) FROM millpond_message"))  # the snapshot
            ((beats,),) = execute(url, BEATS)
            await asyncio.sleep(2 * SHORT)
            await until(lambda: execute(url, BEATS)[0][0] >= beats + 5)
            await delivery.ack(within=session)
            await session.commit()
            results.append("acked")

    async with working(pond):
        found = await became(pond, await pond.publish("q", 1), State.COMPLETED)
    await database.engine.dispose()
    assert results == ["acked"]
    assert (found.deliveries, found.attempts) == (1, 1)


@contextlib.asynccontextmanager
async def releasing(event: asyncio.Event) -> AsyncIterator[None]:
    """Let handlers end that wait for the event, also after a failure."""
    try:
        yield
    finally:
        event.set()


@databases
async def test_a_handler_that_does_not_end_at_its_timeout_is_detached(make_pond: Callable[..., Millpond]) -> None:
    """Its message comes back after a lease, although its worker lives and beats. Its neighbour keeps its lease."""
    hung, other = make_pond(), make_pond()
    release, runs = asyncio.Event(), Counter[str]()

    @hung.subscriber("hang", lease=SHORT, timeout=0.2, heartbeat=0.1, max_workers=1)
    async def hang(body: str) -> None:
        runs[body] += 1
        while not release.is_set():
            with contextlib.suppress(asyncio.CancelledError):
                await release.wait()

    @hung.subscriber("run", lease=600)
    async def run(body: str) -> None:
        runs[body] += 1
        await release.wait()

    @other.subscriber("hang", "run", lease=600)
    async def handle(body: str, delivery: Delivery) -> None:
        runs[body] += 1

    ids = {queue: await hung.publish(queue, queue) for queue in ("hang", "run")}
    async with working(hung), releasing(release):
        await until(lambda: runs.total() == 2)
        async with working(other):
            found = await became(other, ids["hang"], State.COMPLETED)
            assert (found.deliveries, found.attempts) == (2, 1)
            assert hung.worker is not None
            await until(lambda: hung.worker.lost == 1)
            release.set()
            found = await became(other, ids["run"], State.COMPLETED)
    assert (found.deliveries, found.attempts) == (1, 1)
    assert runs == {"hang": 2, "run": 1}


@databases
async def test_messages_are_attached_again_when_the_event_loop_goes_on(pond: Millpond, url: str) -> None:
    """While it is blocked for longer than the timeout, all messages are detached; then they are held as before."""
    finish, runs = asyncio.Event(), Counter[int]()

    @pond.subscriber("q", lease=30, max_workers=10)
    async def handle(body: int) -> None:
        runs[body] += 1
        await finish.wait()

    async def are_detached(number: int, *, blocked: bool) -> bool:
        if blocked:
            pool._last_watch = 0.0
        return await asyncio.to_thread(execute, url, DETACHED) == [(number,)]

    await pond.publish_many("q", range(10))
    async with working(pond):
        assert pond.worker is not None
        pool = pond.worker._pools[0]
        await until(lambda: len(runs) == 10)
        await until(lambda: are_detached(10, blocked=True))
        await until(lambda: are_detached(0, blocked=False))
        assert execute(url, "SELECT count(*) FROM millpond_message WHERE worker IS NOT NULL") == [(10,)]
        finish.set()
        assert await drained(pond) == {State.COMPLETED: 10}
    assert set(runs.values()) == {1}


@databases
async def test_a_handler_that_blocks_the_event_loop_beyond_its_timeout_is_detached(pond: Millpond, url: str) -> None:
    @pond.subscriber("q", lease=600, timeout=0.2)
    async def block(body: int) -> None:
        ends = time.monotonic() + SOON
        while execute(url, DETACHED) != [(1,)] and time.monotonic() < ends:
            time.sleep(0.05)  # noqa: ASYNC251 - a careless handler blocks

    async with working(pond):
        found = await became(pond, await pond.publish("q", 1), State.COMPLETED)
    assert found.deliveries == 1


@databases
async def test_a_result_that_is_dropped_lets_its_message_come_back(
    pond: Millpond, url: str, caplog: pytest.LogCaptureFixture
) -> None:
    """After a lease, while its worker lives."""
    runs: list[int] = []

    @pond.subscriber("q", lease=SHORT)
    async def handle(body: int, delivery: Delivery) -> None:
        runs.append(delivery.claim.deliveries)

    await pond.transport  # a new SQLite file gets its tables
    id_ = await pond.publish("q", 1)
    with contextlib.ExitStack() as cause:
        cause.enter_context(refusing(url, BAD_DATA, id_=id_))
        async with working(pond):
            await until(lambda: "cannot be written" in caplog.text)
            # In a thread: the statement waits for the locks of transactions that only the event loop can end.
            await asyncio.to_thread(cause.close)
            found = await became(pond, id_, State.COMPLETED)
    assert found.deliveries == 2
    assert runs == [1, 2]


@databases
async def test_a_worker_whose_row_was_removed_goes_on(pond: Millpond, url: str, quick_beats: None) -> None:
    runs, finish = Counter[int](), asyncio.Event()

    @pond.subscriber("q", lease=LEASE, max_workers=10)
    async def handle(body: int) -> None:
        runs[body] += 1
        await finish.wait()

    await pond.publish_many("q", range(5))
    async with working(pond):
        await until(lambda: len(runs) == 5)
        for _ in range(3):
            execute(url, "DELETE FROM millpond_worker")
            await until(lambda: execute(url, "SELECT count(*) FROM millpond_worker") == [(1,)])
        await pond.publish_many("q", range(5, 10))
        await until(lambda: len(runs) == 10)
        finish.set()
        assert await drained(pond) == {State.COMPLETED: 10}
    assert set(runs.values()) == {1}


@databases
async def test_a_worker_whose_last_beat_is_older_than_the_lease_does_not_claim(pond: Millpond) -> None:
    @pond.subscriber("q", lease=LEASE)
    async def handle(body: int) -> None: ...

    def stops_claims() -> bool:
        heartbeat._beat_at = time.monotonic() - LEASE - 1
        return not heartbeat.alive  # True unless a beat came just now

    async with working(pond):
        assert pond.worker is not None
        heartbeat: Any = pond.worker._heartbeat
        await until(lambda: heartbeat.alive)
        await until(stops_claims)
        await became(pond, await pond.publish("q", 1), State.COMPLETED)


@contextlib.contextmanager
def proxied(url: str) -> Iterator[Proxy]:
    with Proxy(int(url.rpartition(":")[2].partition("/")[0])) as proxy:
        yield proxy


@servers
@pytest.mark.parametrize("outages", [1, pytest.param(3, marks=[pytest.mark.slow, pytest.mark.long])])
async def test_an_outage_for_all_that_is_longer_than_the_lease_starts_no_handler_again(url: str, outages: int) -> None:
    with proxied(url) as proxy:
        ponds = [Millpond(proxy.url(url)) for _ in range(2)]
        runs, finish = Counter[int](), asyncio.Event()
        for pond in ponds:

            @pond.subscriber("q", lease=LEASE, max_workers=10)
            async def handle(body: int) -> None:
                runs[body] += 1
                await finish.wait()

        await ponds[0].publish_many("q", range(20))
        async with working(ponds[0]), working(ponds[1]):
            await until(lambda: len(runs) == 20)
            for _ in range(outages):
                proxy.refuse()
                proxy.cut()
                await asyncio.sleep(1.5 * LEASE)
                proxy.accept()
                await asyncio.sleep(1.5 * LEASE)
            finish.set()
            assert await drained(ponds[0]) == {State.COMPLETED: 20}
            assert [pond.worker.lost for pond in ponds if pond.worker is not None] == [0, 0]
        for pond in ponds:
            await pond.close()
    assert set(runs.values()) == {1}


@servers
@pytest.mark.parametrize("cancel", [True, False])
async def test_a_worker_that_is_cut_off_may_cancel_its_handlers(
    make_pond: Callable[..., Millpond], url: str, cancel: bool
) -> None:
    """At `dead_after`, from which on another worker may start them. A thread runs on."""
    with proxied(url) as proxy:
        pond, runs, ends = Millpond(proxy.url(url)), Counter[str](), Counter[str]()
        finish, finish_thread = asyncio.Event(), threading.Event()

        @pond.subscriber("q", retry=Retry.none())
        async def handle(body: str, delivery: Delivery) -> None:
            runs[body] += 1
            try:
                await finish.wait()
            except asyncio.CancelledError:
                ends["cancelled"] += 1
                raise
            ends["finished"] += 1

        @pond.subscriber("thread", retry=Retry.none())
        def handle_in_thread(body: str, delivery: Delivery) -> None:
            runs[body] += 1
            finish_thread.wait(SOON)
            ends["interrupted" if delivery.interrupted else "thread"] += 1

        ids = [await pond.publish("q", "async"), await pond.publish("thread", "thread")]
        async with working(pond, dead_after=1.5, cancel_cut_off=cancel):
            await until(lambda: runs.total() == 2)
            proxy.refuse()
            proxy.cut()
            if cancel:
                await until(lambda: ends["cancelled"])
            else:
                await asyncio.sleep(2)
            assert ends == ({"cancelled": 1} if cancel else {})
            finish.set()
            proxy.accept()
            found = await became(pond, ids[0], State.COMPLETED)
            assert found.deliveries == (2 if cancel else 1)
            finish_thread.set()
            assert (await became(pond, ids[1], State.COMPLETED)).deliveries == 1
        await pond.close()
    assert ends == ({"cancelled": 1, "finished": 1, "thread": 1} if cancel else {"finished": 1, "thread": 1})


@databases
async def test_a_stop_leaves_no_message_to_a_worker_that_is_gone(
    pond: Millpond, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Handlers that do not end keep their messages for a lease, which ends by itself."""
    monkeypatch.setattr(worker_module, "_UNWIND", 0.1)
    started, release = asyncio.Event(), asyncio.Event()

    @pond.subscriber("q", lease=600)
    async def handle(body: int) -> None:
        started.set()
        while not release.is_set():
            with contextlib.suppress(asyncio.CancelledError):
                await release.wait()

    id_ = await pond.publish("q", 1)
    run = asyncio.create_task(pond.run(signals=False, graceful_timeout=0.05))
    await started.wait()
    pond.stop()
    await run
    found = await row(pond, id_)
    assert found.state is State.PROCESSING and found.lease_us is not None
    assert execute(url, "SELECT count(*) FROM millpond_worker") == [(0,)]
    assert await counts(pond) == {State.PROCESSING: 1}
    release.set()


@databases
async def test_a_message_that_cannot_be_detached_holds_up_no_other(
    url: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A hung and an abandoned one are refused. The others are detached, and one that hangs no more is attached."""
    store: Any = await millpond.connect(url)
    await store.workers.join()
    await store.publish([Message(queue="q", payload=b"x") for _ in range(9)])
    pool: Any = mock.Mock(shortest=SimpleNamespace(heartbeat_s=3600))
    held = [Delivery(claim, pool) for claim in await store.claim(["q"], 9, by_worker=True)]
    hung, abandoned = held[:5], held[5:]
    pool.held = set(hung)
    pool.take_abandoned = lambda: [abandoned.pop() for _ in range(len(abandoned))]
    running: list[Delivery] = []
    pool.kept_and_hung = lambda: (running, hung)
    leases = HeldLeases([pool])
    bad = ", ".join(id_literal(url, delivery.id) for delivery in (held[1], held[6]))
    with failing(url, "UPDATE", "millpond_message", f"ROW.id IN ({bad})"):
        await leases.keep(store, lambda *_: None)
        assert execute(url, DETACHED) == [(7,)]
        running.append(hung.pop())
        await leases.keep(store, lambda *_: None)
        assert execute(url, DETACHED) == [(6,)]
    await leases.keep(store, lambda *_: None)
    assert execute(url, DETACHED) == [(8,)]
    assert caplog.text.count("claims cannot be checked") == 1
    await store.close()


@databases
async def test_a_message_whose_detach_had_no_reply_is_attached_again(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its handler hung for a while only. Otherwise its own lease would end while the handler runs."""
    store: Any = await millpond.connect(url)
    await store.workers.join()
    await store.publish([Message(queue="q", payload=b"x")])
    (claim,) = await store.claim(["q"], by_worker=True)
    pool: Any = mock.Mock(shortest=SimpleNamespace(heartbeat_s=3600), take_abandoned=list)
    delivery = Delivery(claim, pool)
    hung = [delivery]
    pool.held = {delivery}
    pool.kept_and_hung = lambda: ([] if hung else [delivery], hung)
    leases = HeldLeases([pool])

    async def detach(receipts: Any) -> Any:
        await store_detach(receipts)
        raise StoreUnavailable("no reply")

    store_detach = store.workers.detach
    with monkeypatch.context() as patched:
        patched.setattr(store.workers, "detach", detach)
        await leases.keep(store, lambda *_: None)
    assert execute(url, DETACHED) == [(1,)]
    hung.clear()
    await leases.keep(store, lambda *_: None)
    assert execute(url, DETACHED) == [(0,)]
    await store.close()


@databases
async def test_until_idle_finds_messages_of_dead_workers(
    pond: Millpond, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They go back while it begins, perhaps after its first claim."""
    ran = []

    @pond.subscriber("q")
    async def handle(body: int) -> None:
        ran.append(body)

    await pond.publish("q", 1)
    assert len(await (await pond.transport).claim(["q"])) == 1
    execute(url, "UPDATE millpond_message SET lease_until = 1")
    claim, reap, claimed = DatabaseStore.claim, DatabaseWorkers.reap, asyncio.Event()

    async def claim_first(self: Any, *args: Any, **options: Any) -> Any:
        claims = await claim(self, *args, **options)
        claimed.set()
        return claims

    async def reap_then(self: Any) -> int:
        await claimed.wait()
        return await reap(self)

    async def leave_it_to_the_loop(self: Any, *, may_wait: bool) -> bool:
        return False

    monkeypatch.setattr(DatabaseStore, "claim", claim_first)
    monkeypatch.setattr(DatabaseWorkers, "reap", reap_then)
    monkeypatch.setattr(DatabaseWorkers, "reap_if_due", leave_it_to_the_loop)
    await pond.run(until_idle=True, signals=False)
    assert ran == [1]
