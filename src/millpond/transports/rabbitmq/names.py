"""Names and arguments of everything that is declared at the broker: queues and exchanges."""

from __future__ import annotations

import hashlib
from bisect import bisect_left
from collections.abc import Mapping
from functools import lru_cache
from typing import Any
from urllib.parse import quote

from millpond.clock import SECOND

PREFIX = "millpond."
WAIT_EXCHANGE = "millpond.wait"
WAIT_HEADER = "millpond-wait"
"""Selects the wait queue. The routing key cannot, because it names the queue after the wait."""
DUE_EXCHANGE = "millpond.due"
"""Takes messages whose wait is over to their queues. Its alternate exchange takes those that no queue takes."""
UNDELIVERED = "millpond.undelivered"
"""Exchange and queue for them. In a wait queue, 32 of them would keep all other messages there."""
DUE_ARGUMENTS = {"alternate-exchange": UNDELIVERED}

_STEPS = (100, 125, 160, 200, 250, 320, 400, 500, 640, 800)
BUCKETS = (*(step * 10**power for power in range(5) for step in _STEPS), 10_000_000, 12_500_000, 16_000_000)
BUCKETS = (*BUCKETS, 20_000_000, 25_000_000, 32_000_000, 40_000_000, 50_000_000, 64_000_000, 86_400_000)
"""Milliseconds that a message can wait in one queue."""
_TOLERANCE = 100
"""Milliseconds that a message may be late. Otherwise it waits in a shorter queue first, and for the rest in another."""

_DEAD, _SUSPECTS = f"{PREFIX}dead.", f"{PREFIX}suspects."
_QUORUM = {"x-queue-type": "quorum", "x-delivery-limit": 2**31 - 1}
_KEEP_ALL = {"x-overflow": "reject-publish"}
_AT_LEAST_ONCE = {"x-dead-letter-strategy": "at-least-once", **_KEEP_ALL}

_UNQUOTED = "-_.:@#,/ "
_NAME_LIMIT = 200
"""Bytes. AMQP allows 255; the names of side queues need some of them."""


@lru_cache(maxsize=4096)
def amqp_name(queue: str) -> str:
    """The broker's name of a queue: the same name, unless AMQP cannot hold it or reserves it."""
    name = quote(queue, safe=_UNQUOTED).replace("%", "+")
    if len(name) > _NAME_LIMIT or name.startswith((PREFIX, "amq.")):
        return f"{PREFIX}queue.{hashlib.sha256(queue.encode()).hexdigest()}"
    return name


def dead_name(queue: str) -> str:
    """Name of the side queue that keeps FAILED messages of a queue."""
    if queue == UNDELIVERED:  # listed like the dead letters of a queue
        return UNDELIVERED
    return _DEAD + amqp_name(queue)


def suspects_name(queue: str) -> str:
    """Name of the side queue in which suspects wait to be claimed alone. A worker holds one only to run it."""
    return _SUSPECTS + amqp_name(queue)


def is_suspects(name: str) -> bool:
    return name.startswith(_SUSPECTS)


def wait_name(bucket: int) -> str:
    return f"{WAIT_EXCHANGE}.{bucket}"


def bucket_for(delay_us: int) -> tuple[int, int]:
    """(bucket to wait in, microseconds to wait after it)"""
    wanted = -(-delay_us * 1000 // SECOND)
    at = bisect_left(BUCKETS, wanted)
    if at < len(BUCKETS) and (at == 0 or BUCKETS[at] - wanted <= _TOLERANCE):
        return BUCKETS[at], 0
    bucket = BUCKETS[at - 1]
    return bucket, delay_us - bucket * SECOND // 1000


def work_arguments(
    queue: str, queue_type: str, further: Mapping[str, Any], *, broker_dead_letters: bool
) -> dict[str, Any]:
    """A message that the broker or a client rejects goes to the dead letters; its own headers change nothing.

    The delivery limit is the highest, because Millpond counts. By default RabbitMQ 4 drops a message after 20 returns.
    """
    letters = _dead_lettering(dead_name(queue)) if broker_dead_letters else {}
    if queue_type == "classic":
        return {"x-queue-type": "classic", **letters, **further}
    return {**_QUORUM, **letters, **(_AT_LEAST_ONCE if letters else _KEEP_ALL), **further}


def side_queue_arguments(name: str, *, broker_dead_letters: bool) -> dict[str, Any]:
    """Suspects are dead-lettered as other messages are. Dead letters stay: a full queue refuses further ones."""
    if name == UNDELIVERED:  # a refusal would end all delays of a lifetime
        return dict(_QUORUM)
    if not is_suspects(name) or not broker_dead_letters:
        return {**_QUORUM, **_KEEP_ALL}
    return {**_QUORUM, **_dead_lettering(_DEAD + name.removeprefix(_SUSPECTS)), **_AT_LEAST_ONCE}


def _dead_lettering(to: str) -> dict[str, Any]:
    return {"x-dead-letter-exchange": "", "x-dead-letter-routing-key": to}


def wait_arguments(bucket: int) -> dict[str, Any]:
    """One lifetime for all messages: none waits behind another. At-least-once: the way back is confirmed."""
    return {
        "x-queue-type": "quorum",
        "x-message-ttl": bucket,
        "x-dead-letter-exchange": DUE_EXCHANGE,
        **_AT_LEAST_ONCE,
    }
