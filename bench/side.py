"""The protocol of both sides of a comparison: the same work through Millpond, or by hand."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Protocol, TypeVar

T = TypeVar("T")

QUEUE = "orders"
PRIORITY = 50
LEASE = 300
PAYLOAD = b'{"order": 1234567, "customer": "customer-7", "lines": [' + b'{"sku": 7, "n": 1}, ' * 7 + b"0]}  "
"""200 bytes of JSON."""
ERROR = "ValueError: no such customer"

now = time.perf_counter


class Side(Protocol):
    """Each verb returns its duration in seconds."""

    async def publish(self, count: int, *, notify: bool = True) -> float:
        """Publish one message at a time, each durable before the next. `notify`: also by hand, if the database can."""

    async def publish_bulk(self, count: int, size: int) -> float:
        """Publish in calls of `size` messages; generating ids and records counts."""

    async def drain(self, count: int, batch: int) -> float:
        """Claim messages and ack them into the archive."""

    async def nack(self, count: int, batch: int) -> float:
        """Nack messages, each with its own delay and error; the claims before it do not count."""

    async def close(self) -> None: ...


async def drain_overlapping(
    claim: Callable[[], Awaitable[Sequence[T]]], ack: Callable[[Sequence[T]], Awaitable[Any]], count: int
) -> float:
    """Ack each batch while the next is being claimed, until `count` messages are done."""
    began = now()
    left = count
    rows = await claim()
    while rows:
        left -= len(rows)
        ahead = asyncio.ensure_future(claim()) if left > 0 else None
        await ack(rows)
        rows = await ahead if ahead else ()
    if left > 0:
        raise RuntimeError(f"{left} of {count} messages were missing")
    return now() - began


def delay(n: int) -> int:
    """Seconds; different for each message, like the delays of a retry policy."""
    return 60 + n % 7
