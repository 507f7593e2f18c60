"""Limits of running and claimed messages."""

import asyncio
import threading
from typing import Any

import pytest

from millpond import Message, Millpond, State
from tests.waiting import SOON, until
from tests.worker.conftest import counts, drained, on, working


class Gate:
    """Handlers wait here until it is opened; counts how many were inside at once."""

    def __init__(self) -> None:
        self.open = asyncio.Event()
        self.inside = 0
        self.most = 0

    async def __aenter__(self) -> None:
        self.inside += 1
        self.most = max(self.most, self.inside)
        await self.open.wait()

    async def __aexit__(self, *_: object) -> None:
        self.inside -= 1


async def test_max_workers_limits_running_and_claimed_messages(pond: Millpond) -> None:
    """Messages that cannot run now are left for other workers."""
    gate = Gate()

    @pond.subscriber("q", max_workers=4)
    async def handle(body: int) -> None:
        async with gate:
            pass

    await pond.publish_many("q", range(50))
    async with working(pond):
        await until(lambda: gate.inside == 4)
        assert await counts(pond) == {State.PROCESSING: 4, State.PENDING: 46}
        gate.open.set()
        assert await drained(pond) == {State.COMPLETED: 50}
    assert gate.most == 4


@on("memory", "sqlite")
async def test_max_workers_limits_threads(pond: Millpond) -> None:
    inside, most, lock, opened = 0, 0, threading.Lock(), threading.Event()

    @pond.subscriber("q", max_workers=3)
    def handle(body: int) -> None:
        nonlocal inside, most
        with lock:
            inside += 1
            most = max(most, inside)
        opened.wait(SOON)
        with lock:
            inside -= 1

    await pond.publish_many("q", range(20))
    async with working(pond):
        await until(lambda: inside == 3)
        assert await counts(pond) == {State.PROCESSING: 3, State.PENDING: 17}
        opened.set()
        assert await drained(pond) == {State.COMPLETED: 20}
    assert most == 3


@on("memory")
async def test_a_slot_is_filled_as_soon_as_it_is_free(pond: Millpond) -> None:
    """After a full claim and a freed slot the next claim follows at once, at any poll interval."""
    gates = {n: asyncio.Event() for n in range(6)}
    started: list[int] = []

    @pond.subscriber("q", max_workers=2, max_poll=60)
    async def handle(body: int) -> None:
        started.append(body)
        await gates[body].wait()

    await pond.publish_many("q", range(6))
    async with working(pond):
        for n in range(5):
            await until(lambda n=n: len(started) == min(n + 2, 6))  # type: ignore[misc]
            gates[started[n]].set()
        gates[started[5]].set()
        assert await drained(pond) == {State.COMPLETED: 6}


@on("memory")
async def test_fast_messages_are_claimed_ahead_and_slow_ones_are_not_hoarded(pond: Millpond) -> None:
    """Neither needs a setting."""
    most, gate = 0, Gate()

    @pond.subscriber("q", max_workers=2, fetch=100)
    async def handle(body: str) -> None:
        nonlocal most
        assert pond.worker is not None
        most = max(most, pond.worker.in_flight)
        if body == "slow":
            async with gate:
                pass

    await pond.publish_many("q", ["fast"] * 5000)
    async with working(pond):
        await drained(pond)
        assert 50 < most <= 2 + 100 * 2 + 200, "some ahead, and never more than the caps"
        pool = pond.worker._pools[0]
        await until(lambda: pool.rate < 20)
        await pond.publish_many("q", ["slow"] * 500)
        await until(lambda: gate.inside == 2)
        assert (await counts(pond))[State.PROCESSING] < 20
        gate.open.set()
        await drained(pond)


class Slow:
    """A transport whose settle waits until it is opened."""

    def __init__(self, transport: Any) -> None:
        self._transport = transport
        self.open = asyncio.Event()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    async def settle(self, outcomes: Any, **options: Any) -> Any:
        await self.open.wait()
        return await self._transport.settle(outcomes, **options)


@on("memory")
async def test_claiming_stops_at_the_unsettled_cap_and_resumes(pond: Millpond) -> None:
    from millpond.worker.worker import Worker

    @pond.subscriber("q", max_workers=2, fetch=10, overfetch=1)
    async def handle(body: int) -> None: ...

    await pond.publish_many("q", range(200))
    slow = Slow(await pond.transport)
    worker = Worker(pond.subscriptions)
    run = asyncio.create_task(worker.run(slow))  # type: ignore[arg-type]
    cap = 2 + 2 * 10
    await until(lambda: worker.in_flight == cap)
    for _ in range(20):  # iterations of the event loop in which a worker without a cap would claim the rest
        await asyncio.sleep(0.005)
        assert worker.in_flight <= cap + 10
    slow.open.set()
    assert await drained(pond) == {State.COMPLETED: 200}
    worker.stop()
    await run


async def test_only_subscribed_queues_are_read_in_order(pond: Millpond) -> None:
    got = []

    @pond.subscriber("a", "b", max_workers=1)
    async def handle(body: str) -> None:
        got.append(body)

    transport = await pond.transport
    await transport.publish(
        [Message(queue="c", payload=b'"not ours"'), *(Message(queue="a", payload=b'"a%d"' % n) for n in range(5))]
    )
    await pond.publish("b", "b0", priority=0)
    await pond.publish("a", "urgent", priority=0)
    await pond.publish("a", "later", delay=3600)
    await pond.run(until_idle=True, signals=False)
    assert [body for body in got if body != "b0"] == ["urgent", "a0", "a1", "a2", "a3", "a4"]
    assert "b0" in got
    assert await counts(pond, "c") == {State.PENDING: 1}
    assert await counts(pond, "a") == {State.COMPLETED: 6, State.PENDING: 1}


async def test_several_subscriptions_share_a_worker(pond: Millpond) -> None:
    gate, got = Gate(), []

    @pond.subscriber("slow", max_workers=1)
    async def slow(body: int) -> None:
        async with gate:
            pass

    @pond.subscriber("fast", max_workers=1)
    async def fast(body: int) -> None:
        got.append(body)

    async with working(pond):
        await pond.publish("slow", 1)
        await until(lambda: gate.inside == 1)
        await pond.publish_many("fast", range(20))
        assert await drained(pond, "fast") == {State.COMPLETED: 20}
        gate.open.set()
    assert sorted(got) == list(range(20))


@on("memory")
async def test_memory_use_does_not_grow(pond: Millpond) -> None:
    """1,000 messages leave less than 1 MB behind."""
    import gc
    import tracemalloc

    @pond.subscriber("q", keep_acked=False)
    async def handle(body: dict) -> None: ...

    async with working(pond):

        async def thousand() -> None:
            await pond.publish_many("q", [{"n": n} for n in range(1000)])
            await drained(pond)

        await thousand()
        gc.collect()
        tracemalloc.start()
        before = tracemalloc.get_traced_memory()[0]
        await thousand()
        gc.collect()
        after = tracemalloc.get_traced_memory()[0]
        tracemalloc.stop()
    assert after - before < 1_000_000


@on("memory", "sqlite")
async def test_a_receipt_that_comes_twice_runs_once(pond: Millpond, monkeypatch: pytest.MonkeyPatch) -> None:
    """Twice in one answer, and again while its handler runs."""
    gate, runs = Gate(), 0
    transport: Any = await pond.transport
    real, seen = transport.claim, []

    async def claim(*args: Any, **options: Any) -> list[Any]:
        claims = await real(*args, **options)
        seen.extend(claims)
        return [*claims, *seen]

    monkeypatch.setattr(transport, "claim", claim)

    @pond.subscriber("q", max_workers=8)
    async def handle(body: int) -> None:
        nonlocal runs
        runs += 1
        async with gate:
            pass

    await pond.publish_many("q", range(2))
    async with working(pond):
        await until(lambda: gate.inside == 2)
        await pond.publish("q", 3)
        await until(lambda: gate.inside == 3)
        monkeypatch.undo()
        gate.open.set()
        assert await drained(pond) == {State.COMPLETED: 3}
    assert runs == 3
