"""What is declared at the broker: its queues, its one exchange, and their settings."""

from __future__ import annotations

import hashlib
from bisect import bisect_left
from functools import lru_cache
from typing import Any
from urllib.parse import quote

from millpond.clock import SECOND

OURS = "millpond."
WAIT_EXCHANGE = "millpond.wait"
WAIT_HEADER = "millpond-wait"
"""Chooses the wait queue; the routing key is free to say where the message goes afterwards."""

_STEPS = (100, 125, 160, 200, 250, 320, 400, 500, 640, 800)
BUCKETS = (*(step * 10**power for power in range(5) for step in _STEPS), 10_000_000, 12_500_000, 16_000_000)
BUCKETS = (*BUCKETS, 20_000_000, 25_000_000, 32_000_000, 40_000_000, 50_000_000, 64_000_000, 86_400_000)
"""Milliseconds that a message can wait in one queue: a delay is rounded up, by 28 % at most."""

_PLAIN = "-_.:@#,/ "
_LONGEST_NAME = 200
"""Bytes. AMQP allows 255, of which our own queues' names need some."""


@lru_cache(maxsize=4096)
def amqp_name(queue: str) -> str:
    """The broker's name of a queue: its own, unless AMQP cannot hold it or gives it another meaning."""
    name = quote(queue, safe=_PLAIN).replace("%", "+")
    if len(name) > _LONGEST_NAME or name.startswith((OURS, "amq.")):
        return f"{OURS}queue.{hashlib.sha256(queue.encode()).hexdigest()}"
    return name


def dead_name(queue: str) -> str:
    """Where FAILED messages of a queue are kept."""
    return f"{OURS}dead.{amqp_name(queue)}"


def suspects_name(queue: str) -> str:
    """Where messages that may be poison wait to be claimed alone: nobody holds one that does not run it."""
    return f"{OURS}suspects.{amqp_name(queue)}"


def wait_name(bucket: int) -> str:
    return f"{WAIT_EXCHANGE}.{bucket}"


def bucket_for(delay_us: int) -> tuple[int, int]:
    """(the bucket to wait in, microseconds still to wait afterwards)"""
    longest = BUCKETS[-1] * SECOND // 1000
    if delay_us > longest:
        return BUCKETS[-1], delay_us - longest
    return BUCKETS[bisect_left(BUCKETS, -(-delay_us * 1000 // SECOND))], 0


def work_arguments(queue_type: str) -> dict[str, Any]:
    return {"x-queue-type": queue_type}


def aside_arguments() -> dict[str, Any]:
    """Of dead letters and suspects. We count; a broker of version 4 would by itself drop what came back 20 times."""
    return {"x-queue-type": "quorum", "x-delivery-limit": 2**31 - 1}


def wait_arguments(bucket: int) -> dict[str, Any]:
    """One lifetime for all in the queue, so that none waits behind another; and the way back is confirmed."""
    return {
        "x-queue-type": "quorum",
        "x-message-ttl": bucket,
        "x-dead-letter-exchange": "",
        "x-dead-letter-strategy": "at-least-once",
        "x-overflow": "reject-publish",
    }
