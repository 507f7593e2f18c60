"""A hot shard and a slow shard are findings."""

from __future__ import annotations

import pytest

from millpond.seam.diagnosis import ShardHealth
from millpond.transports.sharded.diagnosis import uneven
from millpond.transports.sharded.store import ShardedStore


def shard(name: str, live: int = 10, seconds: float = 0.002, *, answers: bool = True) -> ShardHealth:
    return ShardHealth(name=name, key_ranges=("-",), answers=answers, seconds=seconds, live=live)


@pytest.mark.parametrize(
    ("shards", "kinds"),
    [
        ([shard("a"), shard("b"), shard("c")], []),
        ([shard("a"), shard("b", live=50_000), shard("c", live=900)], [("hot-shard", "b")]),
        ([shard("a", live=20_000), shard("b", live=50_000), shard("c", live=30_000)], []),
        ([shard("a", live=0), shard("b", live=999), shard("c", live=0)], []),
        ([shard("a"), shard("b"), shard("c", seconds=1.5)], [("slow-shard", "c")]),
        ([shard("a", seconds=0.3), shard("b", seconds=0.9), shard("c", seconds=0.4)], []),
        ([shard("a"), shard("b", live=0, answers=False)], []),
        ([shard("a", live=50_000, seconds=9)], []),
    ],
)
def test_a_shard_that_differs_from_the_others(shards: list[ShardHealth], kinds: list[tuple[str, str]]) -> None:
    found = uneven(shards)
    assert [finding.kind for finding in found] == [kind for kind, _ in kinds]
    assert all(f"the shard {name!r}" in finding.text for finding, (_, name) in zip(found, kinds, strict=True))


async def test_even_shards_are_no_finding(store: ShardedStore) -> None:
    assert {finding.kind for finding in await store.diagnosis.examine()}.isdisjoint({"hot-shard", "slow-shard"})
