"""The archive, newest first, by queue, state and time."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from itertools import chain

import pytest

from millpond import ManualClock, Row, State, Transport
from millpond.clock import as_datetime
from millpond.errors import InvalidOption, InvalidTime
from tests.rooms.operations.lives import complete, fail, pages


@pytest.mark.parametrize("size", [1, 2, 3, 7, 100])
async def test_pages_are_whole(store: Transport, clock: ManualClock, size: int) -> None:
    """Several queues and states; many messages with the same time."""
    for moment in range(4):
        for queue in ("a", "b"):
            await complete(store, queue, 3)
            await fail(store, queue, moment)
        clock.advance(1)
    await complete(store, "c")
    for filters, number in (
        ({}, 37),
        ({"queue": "b"}, 18),
        ({"states": [State.FAILED]}, 12),
        ({"queue": "a", "states": ["COMPLETED"]}, 12),
    ):
        rows: list[Row] = list(chain(*await pages(store.operations.archived, size, **filters)))
        assert len(rows) == len({row.id for row in rows}) == number
        assert [row.position for row in rows] == sorted((row.position for row in rows), reverse=True)


async def test_since_and_until(store: Transport, clock: ManualClock) -> None:
    moments = []
    for _ in range(4):
        await complete(store)
        moments.append(as_datetime(clock.now()))
        clock.advance(1)

    async def between(since: datetime | None, until: datetime | None) -> list[datetime]:
        return [row.archived_at for row in await store.operations.archived("q", since=since, until=until)]

    assert await between(moments[1], moments[3]) == [moments[2], moments[1]]
    assert await between(moments[2], None) == [moments[3], moments[2]]
    assert await between(None, moments[1]) == [moments[0]]
    assert await between(moments[3] + timedelta(seconds=1), None) == []
    rows = await store.operations.archived(until=moments[3], limit=2)
    assert [row.archived_at for row in rows] == [moments[2], moments[1]]
    assert [r.archived_at for r in await store.operations.archived(until=moments[3], after=rows[-1].position)] == [
        moments[0]
    ]


async def test_by_key(store: Transport) -> None:
    await fail(store, key="k'1")
    await fail(store, key="k2")
    assert [row.key for row in await store.operations.archived(key="k'1")] == ["k'1"]


async def test_bad_arguments(store: Transport) -> None:
    naive = datetime(2026, 1, 1)
    for times in ({"since": naive}, {"until": naive}, {"since": "yesterday"}):
        with pytest.raises(InvalidTime):
            await store.operations.archived(**times)  # type: ignore[arg-type]
    with pytest.raises(InvalidOption):
        await store.operations.archived(states=[State.PENDING])
    with pytest.raises(InvalidOption):
        await store.operations.archived(after=("q", False, 1, 2, "x"))
    assert await store.operations.archived(since=datetime(2020, 1, 1, tzinfo=UTC)) == []
