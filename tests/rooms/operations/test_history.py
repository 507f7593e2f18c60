"""Settled messages in buckets of time."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

import millpond
from millpond import ManualClock, Transport
from millpond.errors import InvalidOption, StoreUnavailable
from millpond.seam.operations import QueueHistory
from tests import templates
from tests.patience import patient_shards
from tests.rooms.operations.lives import complete, fail

START = datetime(2026, 1, 1, 12, 30, 15, tzinfo=UTC)
US = 1_000_000


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock(START)


def minutes(found: QueueHistory) -> dict[int, tuple[int, int, bool]]:
    """Buckets by their minutes since 12:30."""
    zero = START.replace(second=0)
    return {
        round(bucket.begin_us / US - zero.timestamp()) // 60: (bucket.completed, bucket.failed, bucket.at_least)
        for bucket in found.buckets
    }


def covered(found: QueueHistory) -> tuple[int, int]:
    zero = START.replace(second=0).timestamp()
    return round(found.since_us / US - zero) // 60, round(found.until_us / US - zero) // 60


async def settled(store: Transport, clock: ManualClock) -> None:
    """Two, three and four completed messages and up to two failed ones in three minutes, and one of another queue."""
    for minute in range(3):
        await complete(store, number=2 + minute)
        if minute:
            await fail(store, number=minute)
        await complete(store, "other")
        clock.advance(60)


async def test_messages_are_counted_in_their_buckets(store: Transport, clock: ManualClock) -> None:
    await settled(store, clock)
    found = await store.operations.history("q", number=10)
    assert minutes(found) == {0: (2, 0, False), 1: (3, 1, False), 2: (4, 2, False)}
    assert (covered(found), found.every_us, found.missing) == ((-6, 4), 60 * US, ())
    assert minutes(await store.operations.history("q", number=2)) == {2: (4, 2, False)}
    earlier = await store.operations.history("q", number=2, until=START.replace(second=0) + timedelta(minutes=2))
    assert (minutes(earlier), covered(earlier)) == ({0: (2, 0, False), 1: (3, 1, False)}, (0, 2))
    hours = await store.operations.history("q", every=3600, number=24)
    assert [(bucket.completed, bucket.failed) for bucket in hours.buckets] == [(9, 3)]
    assert (await store.operations.history("none")).buckets == ()


async def test_a_read_stops_at_its_limit(store: Transport, clock: ManualClock) -> None:
    await settled(store, clock)
    found = await store.operations.history("q", number=10, limit=8)
    assert (minutes(found), covered(found)) == ({1: (3, 1, False), 2: (4, 2, False)}, (1, 4)), "the oldest is cut"
    found = await store.operations.history("q", number=10, limit=6)
    assert (minutes(found), covered(found)) == ({2: (4, 2, False)}, (2, 4))
    found = await store.operations.history("q", number=10, limit=3)
    assert (minutes(found), covered(found)) == ({2: (3, 2, True)}, (2, 4)), "a lower bound"
    wrongs: list[dict[str, Any]] = [{"limit": 0}, {"number": 0}, {"number": 1001}, {"every": 0}, {"limit": 1_000_001}]
    for wrong in wrongs:
        with pytest.raises(InvalidOption):
            await store.operations.history("q", **wrong)


async def test_buckets_of_shards_are_added_and_missing_shards_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = await millpond.connect(templates.shards(tmp_path))
    try:
        with patient_shards():
            await complete(store, number=20)
        found = await store.operations.history("q", every=86_400, number=2)
        assert sum(bucket.completed for bucket in found.buckets) == 20 and found.missing == ()
        away = store.members.shards[1]  # type: ignore[attr-defined]

        async def cut(*args: object, **options: object) -> object:
            raise StoreUnavailable("cut")

        monkeypatch.setattr(away.store.operations, "history", cut)
        found = await store.operations.history("q", every=86_400, number=2)
        assert 0 < sum(bucket.completed for bucket in found.buckets) < 20 and found.missing == (away.name,)
    finally:
        await store.close()
