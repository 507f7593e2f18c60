"""A worker that comes back after its lease finds its receipts stale, whatever it tries; nothing is written."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import sqlite3

import pytest

import millpond
from millpond import Ack, Message, Nack, Outcome, Receipt, Reject, Store
from tests.races.processes import Actor, Actors, report
from tests.waiting import until

OUTCOMES = {
    "ack": Ack,
    "nack": lambda receipt: Nack(receipt, delay=3600, error="again"),
    "reject": lambda receipt: Reject(receipt, reason="never"),
}


async def _late(store: Store, verb: str, receipt: Receipt) -> list[Receipt]:
    if verb == "extend":
        return await store.extend([receipt], 3600)
    outcome: Outcome = OUTCOMES[verb](receipt)
    return await store.settle([outcome])


async def test_a_late_verb_changes_nothing(url: str, store: Store) -> None:
    late = await millpond.connect(url)
    pairs = [(b, a) for b in ("hold", *OUTCOMES) for a in (*OUTCOMES, "extend")]
    try:
        for b, a in pairs:
            (published,) = await store.publish([Message(queue="q", payload=b"x")])
            (old,) = await late.claim(["q"], 1, 0.001)
            assert await until(store.reap) == 1
            (new,) = await store.claim(["q"], 1, 60)
            assert new.redelivered
            if b != "hold":
                outcome: Outcome = OUTCOMES[b](new.receipt)
                assert await store.settle([outcome]) == []
            before = await store.find([published.id])
            assert await _late(late, a, old.receipt) == [old.receipt], (b, a)  # type: ignore[arg-type]
            assert await store.find([published.id]) == before, (b, a)
            if b == "hold":
                assert await store.settle([Ack(new.receipt)]) == []
    finally:
        await late.close()
    report("zombie verbs", url, messages=len(pairs), faults=len(pairs), refused=len(pairs))


async def stopped(zombie: Actor, url: str) -> bool:
    """Stop it; but not while it beats into SQLite, whose one writer nobody else could be then."""
    zombie.signal(signal.SIGSTOP)
    if url.startswith("sqlite"):
        with contextlib.closing(sqlite3.connect(url.removeprefix("sqlite:///"), timeout=1)) as connection:
            try:
                connection.execute("BEGIN IMMEDIATE")
            except sqlite3.OperationalError:
                zombie.signal(signal.SIGCONT)
                return False
    return True


@pytest.mark.parametrize("join", [False, True], ids=["alone", "joined"])
async def test_a_stopped_process_is_refused_when_it_wakes(url: str, store: Store, actors: Actors, join: bool) -> None:
    count = 100
    await store.publish([Message(queue="q", payload=b"x") for _ in range(count)])
    zombie = await actors.start("holder", url=url, number=0, queue="q", count=count, lease=3, join=join)
    assert (await zombie.says())["held"] == count
    await until(lambda: stopped(zombie, url))
    assert await until(store.reap) == count
    claims = await store.claim(["q"], count)
    assert [c.deliveries for c in claims] == [2] * count
    assert await store.settle([Ack(c.receipt) for c in claims]) == []
    zombie.tell("settle")
    zombie.signal(signal.SIGCONT)
    said = await zombie.says()
    await zombie.ends()
    assert (said["refused"], said["reaped"]) == (count, 0)
    report("stopped and woken", url, messages=count, faults=1, refused=said["refused"])


async def test_a_stopped_worker_keeps_what_its_lease_covers(
    server_url: str, server_store: Store, actors: Actors
) -> None:
    """It cannot beat, but its lock says that it lives."""
    await server_store.publish([Message(queue="q", payload=b"x")])
    stopped = await actors.start("holder", url=server_url, number=0, queue="q", count=1, lease=60, join=True)
    assert (await stopped.says())["held"] == 1
    presence = await server_store.join("reaper")
    stopped.signal(signal.SIGSTOP)
    for _ in range(8):
        assert await presence.beat()
        assert await server_store.reap() == 0
        await asyncio.sleep(0.5)
    stopped.tell("settle")
    stopped.signal(signal.SIGCONT)
    assert (await stopped.says())["refused"] == 0
    await stopped.ends()
    report("stopped within its lease", server_url, messages=1, faults=1)
