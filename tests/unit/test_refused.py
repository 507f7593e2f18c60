"""Rows that the database refuses are left out, and tried again after growing pauses."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from millpond.errors import StoreBusy, StoreError
from millpond.transports.database.messages import refused_rows
from millpond.transports.database.messages.refused_rows import RefusedRows


class Table:
    """Rows, of which some are refused. It has the tries in order."""

    def __init__(self, *bad: int) -> None:
        self.bad = set(bad)
        self.tries: list[list[int]] = []
        self.busy = False

    async def write(self, ids: Sequence[int]) -> int:
        self.tries.append(list(ids))
        if self.busy:
            raise StoreBusy("locked")
        if self.bad.intersection(ids):
            raise StoreError("no")
        return len(ids)


@pytest.fixture
def time(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [1000.0]
    monkeypatch.setattr(refused_rows, "monotonic", lambda: now[0])
    return now


async def test_pauses_grow_up_to_a_minute(time: list[float]) -> None:
    rows, table = RefusedRows("rows"), Table(7)
    assert sum(await rows.write(table.write, range(20))) == 19
    pauses = []
    for _ in range(6):
        began = time[0]
        table.tries.clear()
        while not table.tries:
            assert await rows.write(table.write, [7]) == []
            time[0] += 1
        assert table.tries == [[7]]
        pauses.append(time[0] - 1 - began)
    assert pauses == [5, 9, 19, 39, 59, 59]
    table.bad.clear()
    time[0] += 60
    assert await rows.write(table.write, [7]) == [1]
    assert len(rows) == 0


async def test_others_are_written_beside_it_meanwhile(time: list[float]) -> None:
    rows, table = RefusedRows("rows"), Table(7)
    await rows.write(table.write, range(20))
    table.tries.clear()
    assert await rows.write(table.write, [7, 21, 22]) == [2]
    assert table.tries == [[21, 22]]


async def test_rows_that_failed_while_nothing_could_be_written_are_tried_together(time: list[float]) -> None:
    rows, table = RefusedRows("rows"), Table(*range(200))
    with pytest.raises(StoreError):
        await rows.write(table.write, range(200))
    assert len(table.tries) <= 50, "a bound on vain tries"
    table.bad.clear()
    table.tries.clear()
    assert sum(await rows.write(table.write, range(200))) == 200
    assert len(table.tries) == 2


async def test_a_busy_database_makes_no_row_suspicious(time: list[float]) -> None:
    rows, table = RefusedRows("rows"), Table()
    table.busy = True
    with pytest.raises(StoreBusy):
        await rows.write(table.write, range(20))
    assert table.tries == [list(range(20))]
    assert len(rows) == 0


async def test_a_row_that_is_not_seen_again_is_forgotten(time: list[float]) -> None:
    rows, table = RefusedRows("rows"), Table(7)
    await rows.write(table.write, range(20))
    time[0] += 60
    assert len(rows) == 1
    time[0] += 10
    assert len(rows) == 0
