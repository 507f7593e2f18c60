"""Stopping: what runs finishes, what was not started goes back, what does not end is interrupted (FS-C8, C15, C20)."""

import asyncio
import contextlib
import threading
import time
from collections.abc import AsyncIterator
from typing import Any

import pytest

from millpond import Delivery, Millpond, State
from millpond.errors import Closed, InvalidOption, MillpondError
from servers import Postgres, Proxy
from tests.waiting import until
from tests.worker.conftest import became, counts, drained, on, row, working


@contextlib.asynccontextmanager
async def running(pond: Millpond, **options: Any) -> AsyncIterator[asyncio.Task[None]]:
    run = asyncio.create_task(pond.run(**{"signals": False, "graceful_timeout": 20, **options}))
    yield run
    async with asyncio.timeout(60):
        await asyncio.wait([run])
    assert run.done()


@pytest.mark.parametrize("kind", ["single", "batch"])
async def test_running_handlers_finish_and_the_unstarted_go_back(pond: Millpond, kind: str) -> None:
    """FS-C8: stored; not started: delivery not counted, lease cleared."""
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
        # Claimed ahead, and not started: as many as a rate of the past made it want.
        attempts = pond.worker._attempts[0]
        attempts.take(await attempts.transport.claim(["q"], 4))
        assert await counts(pond) == {State.PROCESSING: 7, State.PENDING: 3}
        pond.stop()
        await until(lambda: pond.worker.in_flight == 3)
        finish.set()
        await run
    assert await counts(pond) == {State.COMPLETED: 3, State.PENDING: 7}
    waiting = [r for r in [await row(pond, id_) for id_ in ids] if r.state is State.PENDING]
    assert {(r.deliveries, r.attempts, r.lease_us) for r in waiting} == {(0, 0, None)}


@pytest.mark.parametrize("kind", ["async", "sync", "batch"])
async def test_after_the_grace_period_handlers_are_interrupted(pond: Millpond, kind: str) -> None:
    """FS-C15, FS-D6: PENDING, attempts 0, deliveries 1; handled at the next start."""
    seen: list[bool] = []
    block = True
    event, thread_event = asyncio.Event(), threading.Event()

    async def handle_async(body: int, delivery: Delivery) -> None:
        seen.append(delivery.redelivered)
        if block:
            await event.wait()

    def handle_sync(body: int, delivery: Delivery) -> None:
        seen.append(delivery.redelivered)
        if block:
            thread_event.wait(60)

    async def handle_batch(bodies: list[int], deliveries: list[Delivery]) -> None:
        seen.append(deliveries[0].redelivered)
        if block:
            await event.wait()

    handler = {"async": handle_async, "sync": handle_sync, "batch": handle_batch}[kind]
    pond.subscriber("q", **({"batch": 5} if kind == "batch" else {}))(handler)
    id_ = await pond.publish("q", 1)
    async with running(pond, graceful_timeout=0.1):
        await until(lambda: seen)
        pond.stop()
    found = await row(pond, id_)
    assert (found.state, found.attempts, found.deliveries, found.lease_us) == (State.PENDING, 0, 1, None)
    block = False
    thread_event.set()
    async with working(pond):
        await became(pond, id_, State.COMPLETED)
    assert seen == [False, True]


@on("memory")
async def test_an_acked_message_of_an_interrupted_handler_stays_acked(pond: Millpond) -> None:
    """FS-D6: it must not return to PENDING."""
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
    """FS-C20."""
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
        pond.stop()  # while it connects, perhaps
    assert got == [1]


async def test_a_pond_runs_again_after_it_stopped(pond: Millpond) -> None:
    """The outbox's own audit: "stop then start never fetches"."""

    @pond.subscriber("q")
    async def handle(body: int) -> None: ...

    for _ in range(3):
        async with working(pond):
            await became(pond, await pond.publish("q", 1), State.COMPLETED)
    assert await drained(pond) == {State.COMPLETED: 3}


@on("memory")
async def test_a_cancelled_run_stops_as_if_told_to(pond: Millpond) -> None:
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
    """Sync and async; started before the first claim, stopped after the last outcome was written."""
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
    """Bounded: what cannot be written comes back when its lease ends."""
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
        assert "1 messages could not be settled" in caplog.text
        proxy.accept()
        proxy.resume()
        assert (await row(pond, id_)).state is State.PROCESSING
        await pond.close()
