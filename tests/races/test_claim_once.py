"""Eight processes claim from one queue: each message goes to one of them."""

from __future__ import annotations

from collections import Counter

from millpond import Message, State, Transport
from tests.races.processes import Actors, report


async def test_each_message_is_claimed_once(url: str, store: Transport, actors: Actors) -> None:
    messages = 4_000 if url.startswith("sqlite") else 20_000
    for _ in range(messages // 2_000):
        await store.publish([Message(queue="q", payload=b"x" * 50) for _ in range(2_000)])
    claimers = await actors.start_many(8, "claimer", url=url, queue="q", batch=100)
    for claimer in claimers:
        claimer.send("go")
    claimed: Counter[str] = Counter()
    busy = refused = 0
    for claimer in claimers:
        reply = await claimer.receive()
        claimed.update(reply["ids"])
        refused += reply["refused"]
        busy += bool(reply["ids"])
        await claimer.ends()
    doubled = sum(n - 1 for n in claimed.values())
    report("claimed once", url, messages=messages, lost=messages - len(claimed), doubled=doubled, claimers=busy)
    assert (len(claimed), doubled, refused) == (messages, 0, 0)
    (stats,) = await store.operations.count(["q"])
    assert stats.counts[State.COMPLETED] == messages
    assert busy > 1  # there was a race; SQLite does not serve its writers in a fair order
