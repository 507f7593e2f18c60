"""A worker that continues after its lease finds its receipts stale for every verb; nothing is written."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import sqlite3

import pytest

import millpond
from millpond import Ack, Message, Nack, Outcome, Receipt, Reject, Transport
from tests.races.processes import Actor, Actors, report
from tests.races.roles import beating
from tests.waiting import until

pytestmark = [pytest.mark.slow, pytest.mark.long]

OUTCOMES = {
    "ack": Ack,
    "nack": lambda receipt: Nack(receipt, delay=3600, error="again"),
    "reject": lambda receipt: Reject(receipt, reason="never"),
}


async def _late(store: Transport, verb: str, receipt: Receipt) -> list[Receipt]:
    if verb == "extend":
        return await store.extend([receipt], 3600)
    outcome: Outcome = OUTCOMES[verb](receipt)
    return await store.settle([outcome])


async def test_a_late_verb_changes_nothing(url: str, store: Transport) -> None:
    late = await millpond.connect(url)
    pairs = [(b, a) for b in ("hold", *OUTCOMES) for a in (*OUTCOMES, "extend")]
    try:
        for b, a in pairs:
            (published,) = await store.publish([Message(queue="q", payload=b"x")])
            (old,) = await late.claim(["q"], 1, 0.001)
            assert await until(store.workers.reap) == 1
            (new,) = await store.claim(["q"], 1, 60)
            assert new.redelivered
            if b != "hold":
                outcome: Outcome = OUTCOMES[b](new.receipt)
                assert await store.settle([outcome]) == []
            before = await store.operations.find([published.id])
            assert await _late(late, a, old.receipt) == [old.receipt], (b, a)  # type: ignore[arg-type]
            assert await store.operations.find([published.id]) == before, (b, a)
            if b == "hold":
                assert await store.settle([Ack(new.receipt)]) == []
    finally:
        await late.close()
    report("zombie verbs", url, messages=len(pairs), faults=len(pairs), refused=len(pairs))


async def stopped(zombie: Actor, url: str) -> bool:
    """SIGSTOP, but not while the process writes to SQLite: it would block all other writers."""
    zombie.signal(signal.SIGSTOP)
    if url.startswith("sqlite"):
        with contextlib.closing(sqlite3.connect(url.removeprefix("sqlite:///"), timeout=1)) as connection:
            try:
                connection.execute("BEGIN IMMEDIATE")
            except sqlite3.OperationalError:
                zombie.signal(signal.SIGCONT)
                return False
    return True


@pytest.mark.parametrize("kind", ["alone", "joined", "held"])
async def test_a_stopped_process_is_refused_when_it_wakes(
    url: str, store: Transport, actors: Actors, kind: str
) -> None:
    count, join, held = 100, kind != "alone", kind == "held"
    await store.publish([Message(queue="q", payload=b"x") for _ in range(count)])
    zombie = await actors.start("holder", url=url, number=0, queue="q", count=count, lease=3, join=join, by_worker=held)
    assert (await zombie.receive())["held"] == count
    async with beating(await store.workers.join("reaper")) if held else contextlib.nullcontext():
        await until(lambda: stopped(zombie, url))
        assert await until(store.workers.reap) == count
    claims = await store.claim(["q"], count)
    assert [c.deliveries for c in claims] == [2] * count
    assert await store.settle([Ack(c.receipt) for c in claims]) == []
    zombie.send("settle")
    zombie.signal(signal.SIGCONT)
    reply = await zombie.receive()
    await zombie.ends()
    assert (reply["refused"], reply["reaped"]) == (count, 0)
    report("stopped and woken", url, messages=count, faults=1, refused=reply["refused"])


@pytest.mark.parametrize("by_worker", [True, False], ids=["held", "own leases"])
async def test_a_stopped_worker_keeps_what_its_lease_covers(
    server_url: str, server_store: Transport, actors: Actors, by_worker: bool
) -> None:
    """It cannot beat, but its lock proves that it is alive."""
    await server_store.publish([Message(queue="q", payload=b"x")])
    stopped = await actors.start(
        "holder", url=server_url, number=0, queue="q", count=1, lease=60, join=True, by_worker=by_worker
    )
    assert (await stopped.receive())["held"] == 1
    presence = await server_store.workers.join("reaper")
    stopped.signal(signal.SIGSTOP)
    for _ in range(16):
        assert await presence.beat()
        assert await server_store.workers.reap() == 0
        await asyncio.sleep(0.5)
    stopped.send("settle")
    stopped.signal(signal.SIGCONT)
    assert (await stopped.receive())["refused"] == 0
    await stopped.ends()
    report("stopped within its lease", server_url, messages=1, faults=1)
