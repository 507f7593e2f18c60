"""A publisher that stalls before its COMMIT: its message is older than all that were claimed meanwhile."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import psycopg
import pymysql
import pytest

from millpond import Message, Transport
from millpond.transports.url import Url
from tests.races.processes import Actors, report

pytestmark = pytest.mark.slow

STALL = 5.0
BACKLOG = 20_000


def caller(url: str) -> Any:
    """A connection of an application."""
    if url.startswith("postgresql"):
        return psycopg.connect(url)
    parts = Url(url)
    return pymysql.connect(
        host=parts.host, port=parts.port or 3306, user=parts.user, password=parts.password, database=parts.path[1:]
    )


async def test_it_is_delivered_within_a_second_of_its_commit(
    server_url: str, server_store: Transport, actors: Actors
) -> None:
    connection = caller(server_url)
    try:
        if server_url.startswith("mysql"):
            connection.begin()
        (stalled,) = server_store.transactions.publish_sync([Message(queue="q", payload=b"late")], within=connection)
        # The backlog behind it fills every claim, and claimers skip the range that they have seen.
        for _ in range(BACKLOG // 2_000):
            await server_store.publish([Message(queue="q", payload=b"x") for _ in range(2_000)])
        publishers = await actors.start_many(2, "publisher", url=server_url, queue="q", kind="bulk", pause=0.1)
        consumers = await actors.start_many(
            2, "consumer", url=server_url, queue="q", batch=100, watch=str(stalled.id), pause=0.05
        )
        for actor in (*publishers, *consumers):
            actor.send("go")
        await asyncio.sleep(STALL)
        connection.commit()
        committed_at = time.monotonic()
    finally:
        connection.close()
    met = [asyncio.create_task(consumer.receive()) for consumer in consumers]
    (first,), others = await asyncio.wait(met, timeout=60, return_when=asyncio.FIRST_COMPLETED)
    for actor in (*publishers, *consumers):
        actor.send("stop")
    reply = first.result()
    seconds = reply["at"] - committed_at
    rest = await asyncio.gather(*others, *(publisher.receive() for publisher in publishers))
    waiting = await server_store.claim(["q"], 100)
    report(
        "stalled publisher",
        server_url,
        messages=BACKLOG + sum(len(r.get("new", ())) for r in rest),
        faults=1,
        seconds=round(seconds, 2),
    )
    assert reply["full"]
    assert len(waiting) == 100  # the load lasted to the end
    assert seconds < 15  # about one on a quiet machine; without the unbounded pass, when the backlog is gone
