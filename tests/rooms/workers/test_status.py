"""Workers, their queues and the messages they hold, as an operator sees them."""

from __future__ import annotations

from millpond import Message
from tests.rooms.workers.conftest import Connect


async def test_a_worker_shows_its_queues_and_claims(connect: Connect) -> None:
    store = await connect()
    presence = await store.workers.join("mill-1", queues=["a", "it's"])
    await store.publish([Message(queue="a", payload=b"1"), Message(queue="a", payload=b"2")])
    claims = await store.claim(["a"], 1, by_worker=True)
    (status,) = await store.workers.status()
    assert (status.id, status.name, status.queues) == (presence.id, "mill-1", ("a", "it's"))
    assert (status.held, status.oldest_held_us, status.stopping) == (1, claims[0].claimed_us, False)
    assert status.beats
    (row,) = await store.operations.browse(worker=presence.id)
    assert row.id == claims[0].receipt.id
    await presence.leave()
    assert await store.workers.status() == []
