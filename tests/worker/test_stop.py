"""Stop: running handlers finish, waiting messages are given back, handlers that do not end are interrupted."""

import asyncio
import contextlib
import threading
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from millpond import Delivery, LeaseLost, Millpond, State
from millpond.errors import Closed, InvalidOption, MillpondError
from millpond.worker.worker import Worker
from servers import Postgres, Proxy
from tests.waiting import SOON, until
from tests.worker.conftest import became, counts, drained, on, row, working

pytestmark = pytest.mark.slow_on_servers


@contextlib.asynccontextmanager
async def running(pond: Millpond, **options: Any) -> AsyncIterator[asyncio.Task[None]]:
    run = asyncio.create_task(pond.run(**{"signals": False, "graceful_timeout": 20, **options}))
    yield run
    async with asyncio.timeout(60):
        await asyncio.wait([run])
    assert run.done()


@pytest.mark.parametrize("kind", ["single", "batch"])
async def test_running_handlers_finish_and_the_unstarted_go_back(pond: Millpond, kind: str) -> None:
    """The message is PENDING; its delivery is not counted and its lease is cleared."""
    started, finish = [], asyncio.Event()

    async def one(body: int) -> None:
        started.append(body)
        await finish.wait()

    async def many(bodies: list[int]) -> None:
        started.extend(bodies)
        await finish.wait()

    if kind == "single":
        pond.subscriber("q", max_workers=3)(one)
    else:
        pond.subscriber("q", max_workers=1, batch=3)(many)
    ids = await pond.publish_many("q", range(10))
    async with running(pond) as run:
        await until(lambda: len(started) == 3)
        assert pond.worker is not None
        # Claimed ahead and not started; the number depends on the past rate.
        attempts = pond.worker._pools[0]
        attempts.take(await attempts.transport.claim(["q"], 4))
        assert await counts(pond) == {State.PROCESSING: 7, State.PENDING: 3}
        pond.stop()
        await until(lambda: pond.worker.in_flight == 3)
        finish.set()
        await run
    assert await counts(pond) == {State.COMPLETED: 3, State.PENDING: 7}
    waiting = [r for r in [await row(pond, id_) for id_ in ids] if r.state is State.PENDING]
    assert {(r.deliveries, r.attempts, r.lease_us) for r in waiting} == {(0, 0, None)}


@pytest.mark.parametrize("kind", ["async", "batch"])
async def test_after_the_grace_period_handlers_are_interrupted(pond: Millpond, kind: str) -> None:
    """PENDING, attempts 0, deliveries 1; handled at the next start."""
    seen: list[bool] = []
    block = True
    event = asyncio.Event()

    async def handle_async(body: int, delivery: Delivery) -> None:
        seen.append(delivery.redelivered)
        if block:
            await event.wait()

    async def handle_batch(bodies: list[int], deliveries: list[Delivery]) -> None:
        seen.append(deliveries[0].redelivered)
        if block:
            await event.wait()

    handler = {"async": handle_async, "batch": handle_batch}[kind]
    pond.subscriber("q", **({"batch": 5} if kind == "batch" else {}))(handler)
    id_ = await pond.publish("q", 1)
    async with running(pond, graceful_timeout=0.1):
        await until(lambda: seen)
        pond.stop()
    found = await row(pond, id_)
    assert (found.state, found.attempts, found.deliveries, found.lease_us) == (State.PENDING, 0, 1, None)
    block = False
    async with working(pond):
        await became(pond, id_, State.COMPLETED)
    assert seen == [False, True]


async def test_a_thread_that_ends_when_interrupted_gives_its_message_back(pond: Millpond) -> None:
    """PENDING, attempts 0, deliveries 1, at once."""
    started = threading.Event()

    @pond.subscriber("q")
    def handle(body: int, delivery: Delivery) -> None:
        started.set()
        while not delivery.interrupted:
            time.sleep(0.01)

    id_ = await pond.publish("q", 1)
    async with running(pond, graceful_timeout=0.1):
        await until(started.is_set)
        pond.stop()
    found = await row(pond, id_)
    assert (found.state, found.attempts, found.deliveries, found.lease_us) == (State.PENDING, 0, 1, None)


async def test_the_message_of_a_thread_that_runs_on_is_not_given_back(make_pond: Callable[..., Millpond]) -> None:
    """It comes back when its lease ends: two threads must not run it at once."""
    first, second = make_pond(), make_pond()
    events, release, late = [], threading.Event(), []
    lease = 5.0

    @first.subscriber("q", lease=lease)
    def hang(body: int, delivery: Delivery) -> None:
        events.append("began")
        release.wait(60)
        try:
            delivery.ack_sync()
        except LeaseLost as e:
            late.append(e)

    @second.subscriber("q", lease=lease)
    def handle(body: int, delivery: Delivery) -> None:
        events.append("again" if delivery.redelivered else "for the first time")

    id_ = await first.publish("q", 1)
    async with running(first, graceful_timeout=0.1):
        await until(lambda: events)
        first.stop()
    left = time.monotonic()
    assert (await row(first, id_)).state is State.PROCESSING, "the thread runs on in this process"
    async with working(second):
        await became(second, id_, State.COMPLETED)
        # The last heartbeat may be a third of the lease old, and stopping takes time.
        assert time.monotonic() - left > lease / 3
    release.set()
    await until(lambda: late)
    assert events == ["began", "again"]


@on("memory")
async def test_an_acked_message_of_an_interrupted_handler_stays_acked(pond: Millpond) -> None:
    """The message must not return to PENDING."""
    acked = asyncio.Event()

    @pond.subscriber("q")
    async def handle(body: int, delivery: Delivery) -> None:
        await delivery.ack()
        acked.set()
        await asyncio.Event().wait()

    id_ = await pond.publish("q", 1)
    async with running(pond, graceful_timeout=0.05):
        await acked.wait()
        pond.stop()
    assert (await row(pond, id_)).state is State.COMPLETED


@on("memory", "postgresql")
async def test_a_second_stop_interrupts_at_once(pond: Millpond) -> None:
    started = asyncio.Event()

    @pond.subscriber("q")
    async def handle(body: int) -> None:
        started.set()
        await asyncio.Event().wait()

    id_ = await pond.publish("q", 1)
    async with running(pond, graceful_timeout=600):
        await started.wait()
        pond.stop()
        assert pond.worker is not None
        await until(lambda: not pond.worker.claiming.is_set())
        began = time.monotonic()
        pond.stop()
    assert time.monotonic() - began < 60
    found = await row(pond, id_)
    assert (found.state, found.deliveries, found.attempts) == (State.PENDING, 1, 0)


HANDLERS = ["async", "thread", "batch", "batch in a thread"]


@on("memory", "sqlite", "postgresql")
@pytest.mark.parametrize("kind", HANDLERS)
async def test_a_stop_by_several_handlers_is_one_stop(pond: Millpond, kind: str) -> None:
    """Each of them calls it, as when each may be the last one. No handler is interrupted, and no result lost."""
    stopped, all_stopped = threading.Semaphore(0), threading.Barrier(4)
    finished: list[int] = []

    async def one(body: Any) -> None:
        pond.stop()
        stopped.release()
        await until(lambda: stopped._value == 4)
        finished.append(body)

    def one_in_thread(body: Any) -> None:
        pond.stop()
        all_stopped.wait(SOON)
        finished.append(body)

    handler = one_in_thread if kind.endswith("thread") else one
    pond.subscriber("q", max_workers=4, **({"batch": 1} if kind.startswith("batch") else {}))(handler)
    await pond.publish_many("q", range(4))
    async with running(pond) as run:
        await run
    assert len(finished) == 4
    assert await counts(pond) == {State.COMPLETED: 4}


@on("memory", "sqlite", "postgresql")
async def test_a_third_stop_loses_no_result_of_a_store_that_answers(pond: Millpond) -> None:
    @pond.subscriber("q", max_workers=4)
    async def handle(body: int) -> None:
        assert pond.worker is not None
        pond.worker.stop()  # as a signal does

    await pond.publish_many("q", range(3))
    async with running(pond):
        pass
    assert await counts(pond) == {State.COMPLETED: 3}


@on("memory", "sqlite")
async def test_another_thread_may_stop(pond: Millpond) -> None:
    @pond.subscriber("q", max_poll=3600)
    async def handle(body: int) -> None: ...

    asyncio.get_running_loop().set_debug(True)  # refuses calls from other threads that are not thread-safe
    async with running(pond):
        await until(lambda: pond.worker is not None and pond.worker.claiming.is_set())
        await asyncio.to_thread(pond.stop)


@on("memory", "sqlite")
async def test_a_close_after_a_stop_interrupts_no_handler(pond: Millpond) -> None:
    started, release, finished = asyncio.Event(), asyncio.Event(), []

    @pond.subscriber("q")
    async def handle(body: int) -> None:
        started.set()
        await release.wait()
        finished.append(body)

    await pond.publish("q", 1)
    run = asyncio.create_task(pond.run(signals=False))
    await started.wait()
    pond.stop()
    close = asyncio.create_task(pond.close())
    for _ in range(100):
        await asyncio.sleep(0)
    release.set()
    await asyncio.wait_for(asyncio.gather(close, run), SOON)
    assert finished == [1]


@on("memory", "sqlite")
@pytest.mark.parametrize("how", ["close", "close_sync"])
async def test_a_pond_that_runs_in_another_thread_is_closed(pond: Millpond, how: str) -> None:
    started, release, finished = threading.Event(), threading.Event(), []

    @pond.subscriber("q")
    def handle(body: int) -> None:
        started.set()
        release.wait(SOON)
        finished.append(body)

    open_at_the_end = list[bool]()

    async def work() -> None:
        await pond.run()
        open_at_the_end.append(asyncio.get_running_loop() in pond._connections._opening)

    worker = threading.Thread(target=lambda: asyncio.run(work()))
    worker.start()
    await pond.publish("q", 1)
    assert await asyncio.to_thread(started.wait, SOON)
    closing = pond.close() if how == "close" else asyncio.to_thread(pond.close_sync)
    close = asyncio.create_task(closing)
    await asyncio.sleep(0)
    release.set()
    await asyncio.wait_for(close, SOON)
    assert finished == [1], "the close waited for the handler"
    await asyncio.to_thread(worker.join, SOON)
    assert not worker.is_alive()
    assert open_at_the_end == [False], "the connections of the worker's loop were closed"
    with pytest.raises(Closed):
        await pond.publish("q", 2)


class SlowClaims:
    """A transport whose answers to claims, after the first, come when it is opened."""

    def __init__(self, transport: Any) -> None:
        self._transport = transport
        self.claims = 0
        self.open = asyncio.Event()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    async def claim(self, *args: Any, **options: Any) -> Any:
        claims = await self._transport.claim(*args, **options)
        self.claims += 1
        if self.claims > 1:
            await self.open.wait()
        return claims


@on("memory")
async def test_a_claim_in_progress_at_the_second_stop_gives_back_what_it_brings(pond: Millpond) -> None:
    started = asyncio.Event()

    @pond.subscriber("q")
    async def handle(body: int) -> None:
        started.set()
        await asyncio.Event().wait()

    await pond.publish("q", 1)
    slow = SlowClaims(await pond.transport)
    worker = Worker(pond.subscriptions, graceful_timeout=600)
    run = asyncio.create_task(worker.run(slow))  # type: ignore[arg-type]
    await started.wait()
    late = await pond.publish("q", 2)
    await became(pond, late, State.PROCESSING)
    worker.stop()
    await until(lambda: not worker.claiming.is_set())
    worker.stop()
    await until(lambda: worker.running == 0)
    slow.open.set()
    await run
    assert await counts(pond) == {State.PENDING: 2}


@on("memory")
async def test_a_handler_that_will_not_end_is_left_behind(pond: Millpond, caplog: pytest.LogCaptureFixture) -> None:
    started, release = asyncio.Event(), asyncio.Event()

    @pond.subscriber("q")
    async def handle(body: int) -> None:
        started.set()
        while not release.is_set():
            with contextlib.suppress(asyncio.CancelledError):
                await release.wait()

    await pond.publish("q", 1)
    async with running(pond, graceful_timeout=0.05):
        await started.wait()
        pond.stop()
    assert "left behind" in caplog.text
    release.set()


async def test_stopping_before_starting_is_harmless(pond: Millpond) -> None:
    got = []

    @pond.subscriber("q")
    async def handle(body: int) -> None:
        got.append(body)

    pond.stop()
    async with working(pond):
        id_ = await pond.publish("q", 1)
        await became(pond, id_, State.COMPLETED)
    async with running(pond):
        await until(lambda: pond.worker)
        pond.stop()  # possibly while it connects
    assert got == [1]


async def test_a_pond_runs_again_after_it_stopped(pond: Millpond) -> None:
    """A worker that is stopped and started again claims again."""

    @pond.subscriber("q")
    async def handle(body: int) -> None: ...

    for _ in range(3):
        async with working(pond):
            await became(pond, await pond.publish("q", 1), State.COMPLETED)
    assert await drained(pond) == {State.COMPLETED: 3}


@on("memory")
async def test_a_cancelled_run_stops_in_order(pond: Millpond) -> None:
    started, finish = asyncio.Event(), asyncio.Event()

    @pond.subscriber("q")
    async def handle(body: int) -> None:
        started.set()
        await finish.wait()

    id_ = await pond.publish("q", 1)
    run = asyncio.create_task(pond.run(signals=False))
    await started.wait()
    run.cancel()
    finish.set()
    with pytest.raises(asyncio.CancelledError):
        await run
    assert (await row(pond, id_)).state is State.COMPLETED
    assert pond.worker is None


@on("memory")
async def test_one_run_at_a_time(pond: Millpond) -> None:
    @pond.subscriber("q")
    async def handle(body: int) -> None: ...

    async with working(pond):
        with pytest.raises(MillpondError, match="runs already"):
            await pond.run()


@on("memory")
async def test_closing_a_pond_that_runs_stops_it_first(pond: Millpond) -> None:
    started, finished = asyncio.Event(), []

    @pond.subscriber("q")
    async def handle(body: int) -> None:
        started.set()
        await asyncio.sleep(0.05)
        finished.append(body)

    await pond.publish("q", 1)
    run = asyncio.create_task(pond.run(signals=False))
    await started.wait()
    await pond.close()
    await run
    assert finished == [1]
    with pytest.raises(Closed):
        await pond.run()


@on("memory")
async def test_nothing_to_do_is_an_error(pond: Millpond) -> None:
    with pytest.raises(InvalidOption, match="no subscriber was declared"):
        await pond.run()


@on("memory")
async def test_hooks(pond: Millpond) -> None:
    """Sync and async hooks; start before the first claim, stop after the last outcome was written."""
    events: list[str] = []

    @pond.on_start
    async def connect() -> None:
        events.append("start")

    @pond.on_start
    def connect_too() -> None:
        events.append("start too")

    @pond.on_stop
    async def disconnect() -> None:
        events.append(f"stop {await counts(pond)}")

    @pond.subscriber("q")
    async def handle(body: int) -> None:
        events.append("handle")

    await pond.publish("q", 1)
    await pond.run(until_idle=True, signals=False)
    assert events == ["start", "start too", "handle", "stop {<State.COMPLETED: 'COMPLETED'>: 1}"]


@on("memory")
async def test_a_start_hook_that_fails_lets_nothing_start(pond: Millpond) -> None:
    @pond.on_start
    async def connect() -> None:
        raise ConnectionError("no payment provider")

    @pond.subscriber("q")
    async def handle(body: int) -> None: ...

    id_ = await pond.publish("q", 1)
    with pytest.raises(ConnectionError):
        await pond.run(signals=False)
    assert (await row(pond, id_)).deliveries == 0
    assert pond.worker is None


@on("memory")
async def test_only_some_queues(pond: Millpond) -> None:
    got = []

    @pond.subscriber("a", "b")
    async def handle(body: str) -> None:
        got.append(body)

    @pond.subscriber("c")
    async def other(body: str) -> None:
        got.append(body)

    for queue in "abc":
        await pond.publish(queue, queue)
    await pond.run(queues=["a"], until_idle=True, signals=False)
    assert got == ["a"]
    with pytest.raises(InvalidOption, match="no subscriber serves the queue 'd'; those served are: a, b, c"):
        await pond.run(queues=["d"])


@pytest.mark.parametrize("away", ["refused", pytest.param("silent", marks=pytest.mark.long)])
async def test_stop_while_the_database_is_away_comes_to_an_end(
    postgres_server: Postgres, postgres_url: str, away: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The stop takes a limited time; messages that cannot be settled are given back when their leases end."""
    with Proxy(postgres_server.port) as proxy:
        pond = Millpond(proxy.url(postgres_url), migrate=True, reconnect_timeout=60)
        started, finish = asyncio.Event(), asyncio.Event()

        @pond.subscriber("q")
        async def handle(body: int) -> None:
            started.set()
            await finish.wait()

        id_ = await pond.publish("q", 1)
        run = asyncio.create_task(pond.run(signals=False, graceful_timeout=0.5))
        await started.wait()
        if away == "refused":
            proxy.refuse()
            proxy.cut()
        else:
            proxy.black_hole()
        finish.set()
        began = time.monotonic()
        pond.stop()
        async with asyncio.timeout(60):
            await run
        assert time.monotonic() - began < 50
        assert "messages not settled: 1," in caplog.text
        proxy.accept()
        proxy.resume()
        assert (await row(pond, id_)).state is State.PROCESSING
        await pond.close()
