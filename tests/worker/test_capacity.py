"""How many run at once, how many are claimed, and what runs alone (FS-C7, C11, C12, C13; FS-D9, D17)."""

import asyncio
import threading
from typing import Any

import pytest

from millpond import Delivery, Message, Millpond, State
from tests.waiting import SOON, until
from tests.worker.conftest import counts, drained, on, working


class Gate:
    """Handlers stop here until they are let through; remembers how many were inside at once."""

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


async def test_so_many_run_at_once_and_no_more_are_claimed(pond: Millpond) -> None:
    """FS-C11, and load shedding: what cannot run now stays for others."""
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
async def test_so_many_threads_and_no_more(pond: Millpond) -> None:
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
    """FS-C12: full fetch and freed room: the next claim at once, whatever the poll interval."""
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
async def test_what_is_fast_is_claimed_ahead_and_what_is_slow_is_not_hoarded(pond: Millpond) -> None:
    """FS-D9: no setting is needed for either."""
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
        attempts = pond.worker._attempts[0]
        await until(lambda: attempts.rate < 20)
        await pond.publish_many("q", ["slow"] * 500)
        await until(lambda: gate.inside == 2)
        assert (await counts(pond))[State.PROCESSING] < 20
        gate.open.set()
        await drained(pond)


class Slow:
    """A transport whose settle waits until it is let through."""

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
    """FS-C13."""
    from millpond.worker import Worker

    @pond.subscriber("q", max_workers=2, fetch=10, overfetch=1)
    async def handle(body: int) -> None: ...

    await pond.publish_many("q", range(200))
    slow = Slow(await pond.transport)
    worker = Worker(pond.subscriptions)
    run = asyncio.create_task(worker.run(slow))  # type: ignore[arg-type]
    cap = 2 + 2 * 10
    await until(lambda: worker.in_flight == cap)
    for _ in range(20):  # turns of the event loop, in which a worker without a cap would claim the rest
        await asyncio.sleep(0.005)
        assert worker.in_flight <= cap + 10
    slow.open.set()
    assert await drained(pond) == {State.COMPLETED: 200}
    worker.stop()
    await run


async def test_only_subscribed_queues_are_read_in_order(pond: Millpond) -> None:
    """FS-C7."""
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
async def test_a_suspect_runs_alone_in_the_whole_process(pond: Millpond) -> None:
    """It may take the process with it: its neighbours must not pay for that, in other subscriptions neither."""
    inside: set[str] = set()
    beside: dict[str, set[str]] = {}
    release = asyncio.Event()

    async def note(body: str) -> None:
        inside.add(body)
        for other in inside:
            beside.setdefault(other, set()).update(inside)
        if body.startswith("slow"):
            await release.wait()
        await asyncio.sleep(0)
        inside.discard(body)

    pond.subscriber("a", max_workers=4)(note)

    @pond.subscriber("b", max_workers=4)
    async def other(body: str) -> None:
        await note(body)

    async with pond.testing() as test:
        transport = await pond.transport
        for body in ("suspect 1", "suspect 2"):
            await pond.publish("a", body)
        for _ in range(2):  # two workers that died with them
            assert len(await transport.claim(["a"], 2, lease=1)) == 2
            test.advance(2)
        await pond.publish("b", "slow")
        run = asyncio.create_task(test.run())
        await until(lambda: "slow" in inside)
        await pond.publish_many("a", ["healthy"] * 3)
        await pond.publish_many("b", ["healthy too"] * 3)
        release.set()
        await run
        assert {m.state for queue in "ab" for m in await test.messages(queue)} == {State.COMPLETED}
    assert beside["suspect 1"] == {"suspect 1"}
    assert beside["suspect 2"] == {"suspect 2"}


@on("memory")
async def test_a_suspect_does_not_wait_for_ever_for_others(pond: Millpond, caplog: pytest.LogCaptureFixture) -> None:
    gate = Gate()
    got = []

    @pond.subscriber("a", lease=2)
    async def suspects(delivery: Delivery) -> None:
        got.append(delivery.claim.unfinished)

    @pond.subscriber("b")
    async def slow(body: int) -> None:
        async with gate:
            pass

    transport = await pond.transport
    await pond.publish("a", 1)
    for _ in range(2):
        await until(lambda: transport.claim(["a"], lease=0.001))
    await transport.pause("a")  # type: ignore[attr-defined]
    async with working(pond):
        await pond.publish("b", 1)
        await until(lambda: gate.inside == 1)
        await transport.resume("a")  # type: ignore[attr-defined]
        await until(lambda: got)
        assert gate.inside == 1
        gate.open.set()
    assert got == [2]
    assert "runs beside others" in caplog.text


@on("memory")
async def test_memory_use_does_not_grow(pond: Millpond) -> None:
    """FS-C2: 1,000 messages leave less than 1 MB behind."""
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
