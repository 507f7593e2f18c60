"""Where a message lives among several shards: by its key, or by its id where it has none.

A hash places it on a ring of 2**64 points, and each shard owns an equal range of them. The shards' order decides,
so that it must stay.
"""

from __future__ import annotations

import hashlib

RING = 1 << 64


def place(key: str | None, id_: bytes) -> int:
    """The point of a message on the ring; the same in every process and on every machine."""
    return place_of(id_ if key is None else key.encode())


def place_of(value: bytes) -> int:
    return int.from_bytes(hashlib.blake2b(value, digest_size=8).digest(), "big")


def shard_of(point: int, shards: int) -> int:
    """Which of so many shards owns the point.

    >>> shard_of(0, 4), shard_of(RING - 1, 4)
    (0, 3)
    """
    return point * shards // RING
