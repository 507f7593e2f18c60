"""The shard of a message is the same for ever: these numbers must never change."""

from collections import Counter

from millpond.message import new_id
from millpond.transports.routing import RING, ring_point, shard_of


def test_places_never_change() -> None:
    assert ring_point("customer-7", bytes(16)) == 7606180567624820826
    assert ring_point(None, bytes(16)) == 5931422162917553166


def test_shards_own_equal_ranges() -> None:
    assert [shard_of(point, 3) for point in (0, RING // 3, RING // 3 + 1, RING - 1)] == [0, 0, 1, 2]
    counts = Counter(shard_of(ring_point(None, new_id().bytes), 4) for _ in range(4000))
    assert all(800 < counts[shard] < 1200 for shard in range(4))
    counts = Counter(shard_of(ring_point(f"customer-{n}", b""), 4) for n in range(4000))
    assert all(800 < counts[shard] < 1200 for shard in range(4))
