"""The pond that the fault tests run in separate processes: `millpond run tests.faults.app:pond`.

Every run of a handler writes a row to the effects table before its ack (at least once); `exact` writes another inside
the transaction that acks (exactly once). `sleeper` writes lines to a file instead, because the database may be away.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import signal
import time
from pathlib import Path

from millpond import Delivery, Millpond, Retry
from millpond.telemetry import Event, LeasesLost, Reaped, Reconnected
from tests.faults.aim import Aimed, take_aim
from tests.faults.effects import INSIDE, OUTSIDE, Effects, run_of
from tests.faults.history import History
from tests.faults.plan import Plan
from tests.file_clock import FileClock

_PR_SET_PDEATHSIG = 1

plan = Plan.of_this_process()
folder = Path(plan.folder)
history = History(folder / "history")
aimed = Aimed(plan.aim)
if plan.aim is not None:
    take_aim(aimed)
effects = Effects(plan.effects_url or plan.url)
clock = {} if plan.clock is None else {"clock": FileClock(Path(plan.clock))}
pond = Millpond(plan.url, **plan.connect, **clock)
released = asyncio.Event()


async def plain(number: str, delivery: Delivery) -> None:
    """At least once: the effect, then the ack."""
    aimed.at("handler")
    await asyncio.to_thread(effects.write, run_of(delivery, number, OUTSIDE, os.getpid()))
    aimed.at("effect")
    if plan.hold:
        await released.wait()


def exact(number: str, delivery: Delivery) -> None:
    """An exactly-once effect, in a thread: written and acked in one transaction."""
    pid = os.getpid()
    effects.write(run_of(delivery, number, OUTSIDE, pid))
    while plan.hold and not is_released():
        time.sleep(0.01)
    with effects.transaction() as connection:
        effects.write_in(connection, run_of(delivery, number, INSIDE, pid))
        delivery.ack_sync(within=connection)
        aimed.at("commit")
    aimed.at("committed")


async def sleeper(number: str, delivery: Delivery) -> None:
    """Runs until the test writes the file that ends it."""
    history.write(started=number, deliveries=delivery.claim.deliveries)
    await released.wait()
    history.write(ended=number)


async def poison(kind: str, delivery: Delivery) -> None:
    """Harmless or poison, depending on the message."""
    await asyncio.to_thread(effects.write, run_of(delivery, kind, OUTSIDE, os.getpid()))
    match kind.partition("-")[0]:
        case "raise":
            raise ValueError("poison")
        case "hang":
            await asyncio.sleep(3600)
        case "slow":
            await released.wait()
        case "long":
            await released.wait()
            if not delivery.redelivered:
                raise ValueError("x" * 8000)
        case "exit":
            os._exit(1)
        case "stick" if not delivery.redelivered:  # as C code may: the event loop is blocked
            time.sleep(3600)  # noqa: ASYNC251


def thread(kind: str, delivery: Delivery) -> None:
    """In a thread, which hangs at the first delivery of a message of that name until the test ends it."""
    effects.write(run_of(delivery, kind, OUTSIDE, os.getpid()))
    while kind.startswith("hang") and not delivery.redelivered and not is_released():
        time.sleep(0.01)


async def poisons(kinds: list[str], deliveries: list[Delivery]) -> None:
    """The same for batches: the worst message decides."""
    for kind, delivery in zip(kinds, deliveries, strict=True):
        effects.write(run_of(delivery, kind, OUTSIDE, os.getpid()))
    words = {kind.partition("-")[0] for kind in kinds}
    if "exit" in words:
        os._exit(1)
    if "hang" in words:
        await asyncio.sleep(3600)
    if "raise" in words:
        raise ValueError("poison")


HANDLERS = {
    "plain": plain,
    "exact": exact,
    "sleeper": sleeper,
    "poison": poison,
    "poisons": poisons,
    "thread": thread,
}
for queue, options in plan.queues.items():
    if "retry" in options:
        options["retry"] = Retry(**options["retry"])
    pond.subscriber(queue, *plan.beside.get(queue, ()), **options)(HANDLERS[queue.partition("-")[0]])  # type: ignore[type-var]


def is_released() -> bool:
    return (folder / "released").exists()


@pond.on_start
def begin() -> None:
    # No process outlives its test.
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    pond.telemetry.subscribe(remember)
    if pond.worker is not None:  # otherwise this is a child process, for suspects
        history.write(began=True)
    waiting.add(asyncio.get_running_loop().create_task(wait_for_release()))


@pond.on_stop
def end() -> None:
    history.write(stopped=True)
    for task in waiting:
        task.cancel()


waiting: set[asyncio.Task[None]] = set()


async def wait_for_release() -> None:
    while not is_released():  # noqa: ASYNC110 - another process releases it
        await asyncio.sleep(0.02)
    released.set()


def remember(event: Event) -> None:
    match event:
        case LeasesLost(count=count):
            history.write(lost=count)
        case Reaped(count=count):
            history.write(reaped=count)
        case Reconnected(after=after):
            history.write(reconnected=after)
