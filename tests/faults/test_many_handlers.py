"""Thousands of handlers run through a killed database and a cut network: none of their messages is delivered again."""

from __future__ import annotations

import asyncio
from itertools import count

import pytest

from servers import Proxy
from tests.faults.conftest import Everywhere
from tests.faults.processes import Process, history, stop
from tests.faults.setup import SERVERS, Setup
from tests.waiting import until

HANDLERS = {False: 1_000, True: 5_000}
"""Number of handlers, in the short form and in the long one."""


@pytest.mark.slow
@pytest.mark.databases(*SERVERS, own=True)
async def test_none_is_redelivered(everywhere: Everywhere, long: bool) -> None:
    async def scenario(here: Setup) -> None:
        with Proxy(here.server.port) as proxy, Proxy(here.server.port) as others_proxy:
            faults = await many_handlers(here, proxy, others_proxy, HANDLERS[long], 5 if long else 1)
        ended = {line["ended"] for line in history(here.folder / "many").read() if "ended" in line}
        tally = await here.tally()
        tally.lost = {number for number in here.confirmed if number.startswith("h-")} - ended
        tally.unexpected = tally.unexpected - here.confirmed
        again = await here.one("SELECT count(*) FROM millpond_archive WHERE queue = 'sleeper' AND deliveries <> 1")
        tally.doubled = again
        await here.report(f"{HANDLERS[long]:,} running handlers", tally, faults)
        assert not tally.lost
        assert again == 0

    await everywhere(scenario)


async def many_handlers(here: Setup, proxy: Proxy, others_proxy: Proxy, handlers: int, rounds: int) -> int:
    # Leases outlast every fault here, and handlers have no timeout: other tests cover those.
    options = {"max_workers": handlers, "lease": 120, "heartbeat": 5, "timeout": None}
    many = here.processes.start(here.plan("sleeper", folder="many", options=options, url=proxy.url(here.url)))
    await here.publish("sleeper", [f"h-{n}" for n in range(handlers)])
    await until(lambda: len(started(here)) == handlers, f"{handlers:,} handlers", every=0.2)
    # Another worker would claim the messages; it reaps every second.
    other = here.processes.start(
        here.plan("sleeper", "plain", folder="other", options={"lease": 30}, url=others_proxy.url(here.url))
    )
    await here.steady(other)
    faults = 0
    for n in range(rounds):
        proxy.cut()
        await beats_again(here, many)
        proxy.black_hole()  # the other worker sees a missing beat, while it finds a worker that is really dead
        await the_dead_are_found(here, n, other)
        proxy.resume()
        await beats_again(here, many)
        for each in (proxy, others_proxy):
            each.refuse()
            each.cut()
        await asyncio.sleep(3)
        for each in (proxy, others_proxy):
            each.accept()
        await beats_again(here, many, other)
        await asyncio.to_thread(here.server.kill)
        await asyncio.to_thread(here.server.start)
        await beats_again(here, many, other)
        await the_dead_are_found(here, n + 0.5, other)
        faults += 4
    assert len(started(here)) == handlers
    (here.folder / "many" / "released").touch()
    (here.folder / "other" / "released").touch()
    await here.drained()
    await stop(many, other)
    return faults


def started(here: Setup) -> list[str]:
    return [line["started"] for line in history(here.folder / "many").read() if "started" in line]


async def beats_again(here: Setup, *processes: Process) -> None:
    """Wait for several beats of each worker after this call. The first may fail: the server may be slow to free the
    lock of a session that was cut."""
    beats = dict(await here.rows("SELECT name, beat_at FROM millpond_worker"))
    pids = {str(process.pid) for process in processes}

    async def newer() -> bool:
        rows = await here.rows("SELECT name, beat_at FROM millpond_worker")
        return pids <= {name.rpartition(":")[2] for name, beat in rows if beat > beats.get(name, 0) + 1_500_000}

    await until(newer, f"{here.name}: a heartbeat", every=0.05)


async def the_dead_are_found(here: Setup, n: float, other: Process) -> None:
    """Kill a worker and wait until the other one gives back its messages: then it has judged the living ones too."""
    plan = here.plan("plain", folder=f"doomed-{n}", options={"lease": 60}, hold=True)
    doomed = here.processes.start(plan)
    await until(lambda: [line for line in history(plan.folder).read() if "began" in line], "the doomed one")
    sent = count()

    async def holds() -> bool:
        # The other worker claims from this queue too and may be faster: wait until the victim holds some.
        await here.publish("plain", [f"d{n}-{next(sent)}" for _ in range(20)])
        return bool(await here.one(f"SELECT count(*) FROM effects WHERE pid = {doomed.pid}"))

    await until(holds, "the doomed one to have a message", every=0.05)
    await beats_again(here, doomed)
    doomed.kill()

    async def found() -> bool:
        return bool(await here.one("SELECT count(*) FROM millpond_message WHERE queue = 'plain'") == 0)

    await until(found, f"{here.name}: the messages of the dead", every=0.05)
