"""Cutting PostgreSQL's archive by its pages, with one snapshot for all slices and none held open.

A slice is a range of pages of one or more partitions, which the server reads like the pages of a file. Archived
rows never change, so that what a snapshot shows is told by who inserted a row: transactions that had ended when
the snapshot was taken. Every slice asks that of each row, whenever it runs. The rows of a purge are gone.

Transaction numbers come round after four billion. A row older than a day is taken to be of the snapshot, so that
one of an earlier round is never mistaken for a new one.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from millpond.transports.database.dialect import Dialect
from millpond.transports.database.fetch.conditions import Condition, Operator, where
from millpond.transports.database.fetch.slices import SLICE_BYTES, Piece, Read, Slice, count
from millpond.transports.database.statement import Rows

BLOCK_PAGES = 256
"""Two megabytes, and no column of them can be larger than a value may be, however well it was compressed."""

Ask = Callable[[str, Mapping[str, Any]], Rows]

# A server that replays another's log knows no list of what is in progress there, only where it begins.
_SNAPSHOT = """
SELECT ({now}) - 86400000000,
(CASE WHEN pg_is_in_recovery() THEN pg_snapshot_xmin(s.s) ELSE pg_snapshot_xmax(s.s) END)::text::numeric % 4294967296,
ARRAY(SELECT x::text::numeric % 4294967296 FROM pg_snapshot_xip(s.s) AS x)::text,
current_setting('block_size')::int, current_setting('server_encoding') = 'UTF8'
FROM (SELECT pg_current_snapshot() AS s) s
"""
_PARTITIONS = """
SELECT c.oid::bigint, pg_relation_filenode(c.oid)::bigint, pg_relation_size(c.oid),
coalesce(pg_relation_size(nullif(c.reltoastrelid, 0)), 0) > 0, pg_get_expr(c.relpartbound, c.oid)
FROM pg_inherits i JOIN pg_class c ON c.oid = i.inhrelid WHERE i.inhparent = '{archive}'::regclass ORDER BY c.relname
"""
_BLOCKS = f"""
(SELECT low, least(low + {BLOCK_PAGES}, :high) AS high FROM generate_series(:low, :high - 1, {BLOCK_PAGES}) AS low)
"""
_BOUNDS = re.compile(r"FOR VALUES FROM \('(-?\d+)'\) TO \('(-?\d+)'\)")

# Rewritten by VACUUM FULL, CLUSTER and the like, a table has its rows on other pages, and another file.
_UNMOVED = "SELECT count(*) FROM pg_class WHERE oid = {oid} AND pg_relation_filenode(oid) <> {file}"


@dataclass(frozen=True)
class _Partition:
    oid: int
    file: int
    size: int
    has_toast: bool
    """Some values are kept outside its pages."""
    bounds: tuple[int, int] | None
    """Of `archived_at`; the default partition has none."""


def slices(d: Dialect, ask: Ask, read: Read) -> Sequence[Slice]:
    ((day_ago, limit, in_progress, page, plain_text),) = ask(_SNAPSHOT, {"now": None})
    visible = _visible(int(limit), in_progress)
    conditions, params = where(d, read.conditions)
    params = {**params, "day_ago": day_ago}
    if read.conditions and _estimate(ask, f"{{archive}} WHERE {conditions}", params) <= SLICE_BYTES:
        # Few rows: the server finds them by an index better than we by reading pages.
        return [[Piece(f"FROM {{archive}} WHERE {conditions} AND {visible}", params)]]
    partitions = [p for p in _partitions(ask) if p.size and _may_hold(p, read.conditions)]
    total = sum(partition.size for partition in partitions)
    share = max(page, -(-total // count(total, read.at_least)))
    found: list[list[Piece]] = []
    room = 0
    for partition in partitions:
        for low, high in _page_ranges(partition.size // page, share // page, room // page):
            if room < page:
                found.append([])
                room = share
            room -= (high - low) * page
            in_blocks = plain_text and not partition.has_toast
            found[-1].append(_piece(partition, low, high, f"{conditions} AND {visible}", params, in_blocks=in_blocks))
    return found or [[Piece(f"FROM {{archive}} WHERE {conditions} AND {visible}", params)]]


def _page_ranges(pages: int, share: int, room: int) -> Iterator[tuple[int, int]]:
    """What still has room in the slice before, then slices of a share each."""
    low, high = 0, min(pages, room)
    if high:
        yield low, high
    while high < pages:
        low, high = high, min(pages, high + max(1, share))
        yield low, high


def _piece(
    partition: _Partition, low: int, high: int, conditions: str, params: Mapping[str, Any], *, in_blocks: bool
) -> Piece:
    source = "{archive_default}"
    params = {**params, "low": low, "high": high}
    if partition.bounds:
        # By its bounds, not by its name: a partition that was dropped meanwhile has no rows, and is no error.
        source = "{archive}"
        conditions = f"archived_at >= :start AND archived_at < :end AND {conditions}"
        params |= {"start": partition.bounds[0], "end": partition.bounds[1]}
    first, end = ("b.low", "b.high") if in_blocks else (":low", ":high")
    pages = f"ctid >= ('(' || {first} || ',0)')::tid AND ctid < ('(' || {end} || ',0)')::tid"
    unmoved = _UNMOVED.format(oid=partition.oid, file=partition.file)
    return Piece(f"FROM {source} WHERE {pages} AND {conditions}", params, _BLOCKS if in_blocks else None, unmoved)


def _visible(limit: int, in_progress: str) -> str:
    """Whether the snapshot shows a row: inserted by a transaction before its end, and not one of those in progress."""
    ids = ", ".join(f"'{int(word)}'::xid" for word in in_progress.strip("{}").split(",") if word)
    running = f"AND xmin <> ALL(ARRAY[{ids}])" if ids else ""
    return f"(archived_at < :day_ago OR (age(xmin) > (SELECT age('{limit}'::xid)) {running}))"


def _partitions(ask: Ask) -> Iterator[_Partition]:
    for oid, file, size, has_toast, bounds in ask(_PARTITIONS, {}):
        match = _BOUNDS.fullmatch(bounds or "")
        yield _Partition(oid, file, size, has_toast, (int(match[1]), int(match[2])) if match else None)


def _may_hold(partition: _Partition, conditions: Sequence[Condition]) -> bool:
    if partition.bounds is None:
        return True
    start, end = partition.bounds
    for condition in conditions:
        if condition.column == "archived_at":
            match condition.operator:
                case Operator.ABOVE | Operator.AT_LEAST if condition.value >= end:
                    return False
                case Operator.BELOW | Operator.AT_MOST if condition.value < start:
                    return False
    return True


def _estimate(ask: Ask, source: str, params: Mapping[str, Any]) -> int:
    """How many bytes the server expects, by its statistics."""
    ((plan,),) = ask(f"EXPLAIN (FORMAT JSON) SELECT * FROM {source}", params)
    node = msgspec.json.decode(plan)[0]["Plan"]
    return int(node["Plan Rows"] * node["Plan Width"])
