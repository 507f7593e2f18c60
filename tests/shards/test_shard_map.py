"""Key ranges and shard maps as values."""

import pytest

from millpond.errors import InvalidOption, ShardMapMismatch
from millpond.transports.key_range import KeyRange
from millpond.transports.routing import RING
from millpond.transports.shard_map import ShardMap


@pytest.mark.parametrize("text", ["-", "-80", "80-", "40-80", "55-aa", "-0001", "0123456789abcdef-"])
def test_a_key_range_is_written_as_it_was_read(text: str) -> None:
    assert str(KeyRange.parse(text)) == text


def test_the_bounds_of_a_key_range() -> None:
    assert KeyRange.parse("-80") == KeyRange(0, 1 << 63)
    assert KeyRange.parse("80-") == KeyRange(1 << 63, RING)
    assert KeyRange.parse("40-80").contains(1 << 62) and not KeyRange.parse("40-80").contains(1 << 63)


@pytest.mark.parametrize("text", ["", "80", "8-", "-8", "80-40", "80-80", "x-", "-00112233445566778899", "--", 7, None])
def test_other_texts_are_no_key_ranges(text: object) -> None:
    with pytest.raises(InvalidOption):
        KeyRange.parse(text)


@pytest.mark.parametrize("count", [1, 2, 3, 4, 7, 256, 300])
def test_even_ranges_cover_the_ring(count: int) -> None:
    names = [f"s{n}" for n in range(count)]
    map_ = ShardMap.even("pond", names)
    assert [shard for _, shard in map_.ranges] == names
    sizes = [KeyRange.parse(text).stop - KeyRange.parse(text).start for text, _ in map_.ranges]
    assert sum(sizes) == RING
    assert max(sizes) <= 2 * min(sizes)
    for text, shard in map_.ranges:
        found = KeyRange.parse(text)
        assert map_.shard_of(found.start) == map_.shard_of(found.stop - 1) == shard


def test_two_and_three_shards_have_the_ranges_of_vitess() -> None:
    assert [text for text, _ in ShardMap.even("p", ["a", "b"]).ranges] == ["-80", "80-"]
    assert [text for text, _ in ShardMap.even("p", ["a", "b", "c"]).ranges] == ["-55", "55-aa", "aa-"]


def test_placement_never_changes() -> None:
    """These values are in databases of users."""
    map_ = ShardMap.even("p", ["a", "b", "c", "d"])
    assert [map_.place(f"customer-{n}", b"") for n in range(8)] == ["c", "d", "d", "d", "b", "a", "a", "b"]
    assert map_.place(None, bytes(16)) == "b"


def test_a_map_survives_its_encoding() -> None:
    map_ = ShardMap.even("p", ["a", "b", "c"])
    assert ShardMap.decode(map_.encode()) == map_


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{}",
        '{"pond":"p","version":1,"shards":["a"],"ranges":[["-80","a"]]}',
        '{"pond":"p","version":1,"shards":["a"],"ranges":[["-80","a"],["90-","a"]]}',
        '{"pond":"p","version":1,"shards":["a"],"ranges":[["-80","a"],["80-","b"]]}',
        '{"pond":"p","version":1,"shards":["a","a"],"ranges":[["-","a"]]}',
        '{"pond":"p","version":1,"shards":["a b"],"ranges":[["-","a b"]]}',
    ],
)
def test_a_damaged_map_is_refused(text: str) -> None:
    with pytest.raises(ShardMapMismatch):
        ShardMap.decode(text)


def test_a_subset_by_name_or_exact_range() -> None:
    map_ = ShardMap.even("p", ["a", "b", "c", "d"])
    assert map_.select(["c", "a"]) == ["a", "c"]
    assert map_.select(["-40"]) == ["a"]
    assert map_.select(["-80"]) == ["a", "b"]
    assert map_.select(["-40", "c0-"]) == ["a", "d"]


@pytest.mark.parametrize("wanted", ["e", "-20", "-50", "20-", "10-20"])
def test_a_subset_that_does_not_match_the_map_is_an_error(wanted: str) -> None:
    with pytest.raises(InvalidOption):
        ShardMap.even("p", ["a", "b", "c", "d"]).select([wanted])


@pytest.mark.parametrize("name", ["80-", "40-80", "ab-cd"])
def test_a_new_shard_is_not_named_like_a_key_range(name: str) -> None:
    """`millpond shards move 80- --to c` would move all ranges of that shard."""
    with pytest.raises(InvalidOption, match="also a key range"):
        ShardMap.even("pond", ["a", name])
    with pytest.raises(InvalidOption, match="also a key range"):
        ShardMap.even("pond", ["a"]).with_shard(name)
