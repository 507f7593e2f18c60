"""Databases with live and archived messages of every kind, for tests that read them."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any
from uuid import UUID

import millpond
from millpond import Ack, Message, Nack, Reject

HOSTILE = (
    "orders",
    "o'rders\"; DROP TABLE message; --",
    "%s $1 :name {archive}",
    "größe 日本 \U0001f980",
    "a\\b\nc",
)


def fill(url: str, queues: Sequence[str] = HOSTILE, each: int = 12, **options: Any) -> None:
    """Fill each queue: a third is archived as acked or rejected, the rest is pending, retryable or in processing."""
    asyncio.run(_fill(url, queues, each, options))


async def _fill(url: str, queues: Sequence[str], each: int, options: dict[str, Any]) -> None:
    store: Any = await millpond.connect(url, migrate=True, **options)
    for queue in queues:
        await store.publish(
            [
                Message(
                    queue=queue,
                    key=None if n % 3 == 0 else f"key {n} ü",
                    priority=n % 101,
                    payload=bytes([n % 256]) * n,
                    headers={"n": n, "text": "é"} if n % 2 else {},
                    expires=3600 if n % 4 == 0 else None,
                )
                for n in range(each)
            ]
        )
        claims = await store.claim([queue], limit=each * 2 // 3, lease=60)
        done = len(claims) // 2
        assert not await store.settle(
            [
                *(
                    Ack(claim.receipt) if n % 2 else Reject(claim.receipt, "why not")
                    for n, claim in enumerate(claims[:done])
                ),
                *(Nack(claim.receipt, delay=60) for claim in claims[done : done + 2]),
            ]
        )
    await store.close()


def rows(url: str, table: str, **options: Any) -> dict[UUID, Any]:
    """Rows as the store returns them, by id."""
    return asyncio.run(_rows(url, table, options))


async def _rows(url: str, table: str, options: dict[str, Any]) -> dict[UUID, Any]:
    store: Any = await millpond.connect(url, **options)
    found: dict[UUID, Any] = {}
    after = None
    while True:
        look = store.operations.archived if table == "archive" else store.operations.browse
        page = await look(limit=500, after=after)
        found |= {UUID(int=row.id.int): row for row in page}
        if len(page) < 500:
            break
        after = page[-1].position
    await store.close()
    return found


def password(url: str) -> str:
    """The password, which no text may show; for a file, some text that occurs nowhere."""
    return url.partition("//")[2].partition("@")[0].partition(":")[2] or "\0"
