"""Leases are extended while handlers run, even if they block the event loop; lost leases are announced and counted."""

import asyncio
import logging
import threading
import time
from collections.abc import Callable

import pytest

from millpond import Capability, Delivery, GiveBack, Millpond, Retry, State
from millpond.telemetry import Counters, LeasesLost
from tests.waiting import SOON, until
from tests.worker.conftest import became, on, row, working

pytestmark = pytest.mark.slow_on_servers

LEASE = 2.0
"""Lease in seconds. The heartbeat extends it every third of it, and may be late on a busy machine."""
LONGER = 2.2 * LEASE


async def test_long_runs_keep_their_lease(make_pond: Callable[..., Millpond]) -> None:
    """Another worker would claim the message if its lease ended."""
    ponds = [make_pond(), make_pond()]
    runs: list[tuple[str, int]] = []

    for pond in ponds:

        @pond.subscriber("async", lease=LEASE)
        async def handle(body: int, delivery: Delivery) -> None:
            runs.append(("async", delivery.claim.deliveries))
            await asyncio.sleep(LONGER)

        @pond.subscriber("sync", lease=LEASE)
        def handle_in_thread(body: int, delivery: Delivery) -> None:
            runs.append(("sync", delivery.claim.deliveries))
            time.sleep(LONGER)

    first, second = ponds
    async with working(first), working(second):
        ids = [await first.publish(queue, 1) for queue in ("async", "sync")]
        found = [await became(first, id_, State.COMPLETED) for id_ in ids]
    assert sorted(runs) == [("async", 1), ("sync", 1)]
    assert [(row.deliveries, row.attempts) for row in found] == [(1, 1)] * 2


async def test_one_that_blocks_the_event_loop_keeps_its_lease(make_pond: Callable[..., Millpond]) -> None:
    """The heartbeat has its own thread. The other worker has one too; otherwise it would be blocked as well."""
    first, second = make_pond(), make_pond()
    runs: list[int] = []

    for pond in (first, second):

        @pond.subscriber("q", lease=LEASE)
        async def handle(body: int, delivery: Delivery) -> None:
            runs.append(delivery.claim.deliveries)
            time.sleep(LONGER)  # noqa: ASYNC251 - a careless handler blocks

    transport = await first.transport
    async with working(first):
        if Capability.SHARED in transport.capabilities:
            threading.Thread(target=_work_beside, args=(second,), daemon=True).start()
        found = await became(first, await first.publish("q", 1), State.COMPLETED)
        await until(lambda: second.worker is None)
    assert runs == [1]
    assert (found.deliveries, found.attempts) == (1, 1)


def _work_beside(pond: Millpond) -> None:
    """A worker in another thread."""

    async def work() -> None:
        run = asyncio.create_task(pond.run(signals=False))
        await asyncio.sleep(1.5 * LONGER)
        pond.stop()
        await run
        opening = pond._connections._opening.pop(asyncio.get_running_loop())
        await (await opening).close()

    asyncio.run(work())


async def test_a_lost_lease_cancels_the_handler_and_is_counted_once(
    pond: Millpond, caplog: pytest.LogCaptureFixture
) -> None:
    counters, events = Counters(), []
    pond.telemetry.subscribe(counters)
    pond.telemetry.subscribe(events.append, LeasesLost)
    cancelled = asyncio.Event()
    runs = []

    @pond.subscriber("q", lease=5, heartbeat=0.1)
    async def handle(body: int, delivery: Delivery) -> None:
        runs.append(delivery.claim.deliveries)
        if len(runs) > 1:
            return
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            assert delivery.lost and delivery.interrupted
            cancelled.set()
            raise

    async with working(pond):
        id_ = await pond.publish("q", 1)
        await until(lambda: runs)
        await give_back_by_another(pond)
        async with asyncio.timeout(SOON):
            await cancelled.wait()
        found = await became(pond, id_, State.COMPLETED)
        assert pond.worker is not None
        assert pond.worker.lost == 1
    assert runs == [1, 2]
    assert (found.attempts, found.deliveries) == (1, 2)
    assert events == [LeasesLost("q", 1, (id_,))]
    assert counters["lease lost"] == 1
    (line,) = [r for r in caplog.records if "leases lost" in r.message]
    assert (line.levelno, line.queue, line.count) == (logging.WARNING, "q", 1)  # type: ignore[attr-defined]


async def give_back_by_another(pond: Millpond) -> None:
    """Give the message back, as a reaper does that finds this worker dead."""
    worker = pond.worker
    assert worker is not None
    await until(lambda: worker.running)
    (delivery,) = worker._pools[0].held
    assert await (await pond.transport).settle([GiveBack(delivery.claim.receipt, delivered=True)]) == []


@on("memory", "postgresql")
async def test_a_handler_that_is_not_to_be_cancelled_finishes_in_vain(pond: Millpond) -> None:
    lost, finish, runs = asyncio.Event(), asyncio.Event(), []

    @pond.subscriber("q", lease=5, heartbeat=0.1, cancel_lost=False, max_workers=2)
    async def handle(body: int, delivery: Delivery) -> None:
        runs.append(delivery.claim.deliveries)
        if len(runs) == 1:
            await until(lambda: delivery.lost)
            lost.set()
            await finish.wait()
            raise ValueError("this outcome is not written")

    async with working(pond):
        id_ = await pond.publish("q", 1)
        await until(lambda: runs)
        await give_back_by_another(pond)
        async with asyncio.timeout(SOON):
            await lost.wait()
        found = await became(pond, id_, State.COMPLETED)
        finish.set()
        assert pond.worker is not None
        await until(lambda: pond.worker.running == 0)
        assert pond.worker.lost == 1
    assert (found.attempts, found.error) == (1, None)


@on("memory")
async def test_a_batch_is_cancelled_when_all_its_leases_are_lost(pond: Millpond) -> None:
    ended = []
    runs = 0

    @pond.subscriber("q", batch=2, max_workers=1, lease=5, heartbeat=0.05)
    async def handle(bodies: list[int], deliveries: list[Delivery]) -> None:
        nonlocal runs
        runs += 1
        if runs == 1:
            transport = await pond.transport
            try:
                for delivery in deliveries:
                    await transport.settle([GiveBack(delivery.claim.receipt, delivered=True)])
                    await until(lambda d=delivery: d.lost)  # type: ignore[misc]
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                ended.append([d.lost for d in deliveries])
                raise

    await pond.publish_many("q", range(2))
    await pond.run(until_idle=True, signals=False)
    assert ended == [[True, True]]
    assert runs == 2


@on("memory", "postgresql")
async def test_a_message_settled_meanwhile_is_not_lost(pond: Millpond) -> None:
    """An extension after the message was settled is no lost lease."""
    done = 0

    @pond.subscriber("q", heartbeat=0.02, max_workers=50)
    async def handle(body: int) -> None:
        nonlocal done
        await asyncio.sleep(0.02)
        done += 1

    await pond.publish_many("q", range(1500))
    async with working(pond):
        await until(lambda: done == 1500)
        assert pond.worker is not None
        await until(lambda: pond.worker.in_flight == 0)
        assert pond.worker.lost == 0


@on("postgresql")
async def test_a_hung_handler_loses_its_lease_after_its_timeout(make_pond: Callable[..., Millpond]) -> None:
    """A heartbeat must not extend forever the lease of a handler that hangs in C code and blocks the event loop."""
    hung, other = make_pond(), make_pond()
    release, got = threading.Event(), []

    @hung.subscriber("q", lease=0.6, timeout=0.5)
    async def hang(body: int) -> None:
        release.wait(SOON)

    @other.subscriber("q")
    async def handle(body: int, delivery: Delivery) -> None:
        got.append(delivery.claim.deliveries)

    def work() -> None:
        async def run() -> None:
            await hung.run(signals=False, graceful_timeout=1)
            await (await hung._connections._opening.pop(asyncio.get_running_loop())).close()

        asyncio.run(run())

    thread = threading.Thread(target=work, daemon=True)
    id_ = await other.publish("q", 1)
    thread.start()
    await became(other, id_, State.PROCESSING)
    async with working(other):
        found = await became(other, id_, State.COMPLETED)
        release.set()
        worker = hung.worker
        assert worker is not None
        await until(lambda: worker.lost == 1 or worker.in_flight == 0)
        hung_loop = worker._pools[0].loop
        hung_loop.call_soon_threadsafe(hung.stop)
        await asyncio.to_thread(thread.join, SOON)
    assert got == [2]
    assert (await row(other, id_)).attempts == found.attempts == 1, "the late result was refused"


@on("memory")
async def test_retry_after_a_lost_lease_uses_the_policy_of_its_own_delivery(pond: Millpond) -> None:
    """The old handler's failure is not the new delivery's."""
    runs = []

    @pond.subscriber("q", lease=5, heartbeat=0.05, retry=Retry.none())
    async def handle(body: int, delivery: Delivery) -> None:
        runs.append(delivery.attempt)
        if len(runs) == 1:
            await (await pond.transport).settle([GiveBack(delivery.claim.receipt, delivered=True)])
            await asyncio.Event().wait()

    id_ = await pond.publish("q", 1)
    await pond.run(until_idle=True, signals=False)
    assert runs == [1, 1]
    assert (await row(pond, id_)).state is State.COMPLETED
