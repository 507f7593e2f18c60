"""The wait of a message after a crash: none after the first, then twice as long after each, up to a bound."""

from __future__ import annotations

from typing import Any

from millpond import ManualClock, Message
from millpond.clock import SECOND
from millpond.outcome import crash_delay
from tests.rooms.workers.conftest import Connect
from tests.triggers import execute, id_literal


async def test_the_reaper_waits_as_long_as_a_worker_after_a_child(
    url: str, store: Any, clock: ManualClock, connect: Connect
) -> None:
    """Its SQL has the delays of `crash_delay`, for crashes 1 to 9."""
    presence = await store.workers.join()
    published = [p.id for p in await store.publish([Message(queue="q", payload=b"%d" % n) for n in range(9)])]
    for crashes, id_ in enumerate(published):
        execute(url, f"UPDATE millpond_message SET crashes = {crashes} WHERE id = {id_literal(url, id_)}")
    claims = await store.claim(["q"], 9, ids=published, by_worker=True)
    due = {claim.receipt.id: claim.due_us for claim in claims}
    assert await store.workers.detach([claim.receipt for claim in claims]) == []
    clock.advance(60)
    await presence.beat()
    assert await (await connect()).workers.reap() == 9
    rows = {row.id: row for row in await store.operations.find(published)}
    assert [rows[id_].crashes for id_ in published] == list(range(1, 10))
    assert rows[published[0]].due_us == due[published[0]], "due at once, in its place"
    waits = [(rows[id_].due_us - clock.now()) / SECOND for id_ in published[1:]]
    assert waits == [crash_delay(n) for n in range(2, 10)] == [1, 2, 4, 8, 16, 32, 64, 64]
