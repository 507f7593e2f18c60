"""The point of a message on a ring of 2**64 points: a hash of its key, or of its id if it has no key.

The shard map gives each shard ranges of the ring.
"""

from __future__ import annotations

import hashlib

RING = 1 << 64


def ring_point(key: str | None, id_: bytes) -> int:
    """Point of a message on the ring, the same in every process and on every machine."""
    value = id_ if key is None else key.encode()
    return int.from_bytes(hashlib.blake2b(value, digest_size=8).digest(), "big")


def shard_of(point: int, shards: int) -> int:
    """Number of the database that owns the point, of several without a shard map: each has an equal range.

    Their order decides, so it must not change.

    >>> shard_of(0, 4), shard_of(RING - 1, 4)
    (0, 3)
    """
    return point * shards // RING
