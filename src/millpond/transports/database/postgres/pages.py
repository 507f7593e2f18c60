"""Slices of PostgreSQL's archive by pages. All slices show one snapshot, and no transaction is held open.

A slice is a range of pages of one or more partitions, which the server reads like the pages of a file. Archived rows
never change, so a row belongs to the snapshot if the transaction that inserted it had ended by then. Every slice
checks this for each row, whenever it runs. Rows that were purged meanwhile are missing.

Transaction numbers wrap around after four billion. A row older than a day always belongs to the snapshot, because its
number may be from an earlier round and look new.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from millpond.seam.arrow import Condition, Operator, Piece, Read, Slice
from millpond.transports.database.arrow.conditions import where
from millpond.transports.database.arrow.slices import SLICE_BYTES, count
from millpond.transports.database.sql.dialect import Dialect
from millpond.transports.database.sql.statement import Rows

BLOCK_PAGES = 256
"""Two megabytes: even well compressed, no column of that many pages exceeds the largest value."""

Ask = Callable[[str, Mapping[str, Any]], Rows]

# A standby has no list of the primary's running transactions. It knows only the oldest one.
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

# VACUUM FULL, CLUSTER and similar commands move rows to other pages of another file.
_REWRITTEN = "SELECT count(*) FROM pg_class WHERE oid = {oid} AND pg_relation_filenode(oid) <> {file}"


@dataclass(frozen=True)
class _Partition:
    oid: int
    file: int
    size: int
    has_toast: bool
    """Some values are stored outside its pages (TOAST)."""
    bounds: tuple[int, int] | None
    """Bounds of `archived_at`; the default partition has none."""


def slices(d: Dialect, ask: Ask, read: Read) -> Sequence[Slice]:
    ((day_ago, limit, in_progress, page, plain_text),) = ask(_SNAPSHOT, {"now": None})
    visible = _visible(int(limit), in_progress)
    conditions, params = where(d, read.conditions)
    params = {**params, "day_ago": day_ago}
    everything = [[Piece(f"FROM {{archive}} WHERE {conditions} AND {visible}", params)]]
    if read.conditions and _estimate(ask, f"{{archive}} WHERE {conditions}", params) <= SLICE_BYTES:
        return everything  # few rows: an index finds them faster than reading pages
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
    return found or everything


def _page_ranges(pages: int, share: int, room: int) -> Iterator[tuple[int, int]]:
    """First a range that fills the previous slice (`room` pages), then ranges of `share` pages."""
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
        # By its bounds, not by its name: a partition that was dropped meanwhile is then empty, not an error.
        source = "{archive}"
        conditions = f"archived_at >= :start AND archived_at < :end AND {conditions}"
        params |= {"start": partition.bounds[0], "end": partition.bounds[1]}
    first, end = ("b.low", "b.high") if in_blocks else (":low", ":high")
    pages = f"ctid >= ('(' || {first} || ',0)')::tid AND ctid < ('(' || {end} || ',0)')::tid"
    rewritten = _REWRITTEN.format(oid=partition.oid, file=partition.file)
    return Piece(f"FROM {source} WHERE {pages} AND {conditions}", params, _BLOCKS if in_blocks else None, rewritten)


def _visible(limit: int, in_progress: str) -> str:
    """A condition: the row was inserted by a transaction that had ended when the snapshot was taken."""
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
    """Number of bytes that the planner expects."""
    ((plan,),) = ask(f"EXPLAIN (FORMAT JSON) SELECT * FROM {source}", params)
    node = msgspec.json.decode(plan)[0]["Plan"]
    return int(node["Plan Rows"] * node["Plan Width"])
