"""Streams, as steps: who drives one, what is decided about its messages, and their acknowledgement by numbers.

Each verb of a driver is one transaction that begins by locking the stream's row and comparing its epoch, so that
whoever opened it last is the only one that writes. At most two claims are open at a time, those after the last
acknowledged: the first of two is done with, and being acknowledged while the second is worked on.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from millpond.clock import SECOND, micros
from millpond.errors import StreamFenced, UnknownStream, claim_lost, stream_behind
from millpond.message import State, short_error
from millpond.transport import Recorded, Settlement, Slice, StreamClaim, StreamStatus
from millpond.transports.database import stream_statements as sql
from millpond.transports.database.dialect import Dialect
from millpond.transports.database.statement import Query, Rows, Steps

_NO_OUTCOME = "no outcome was recorded"


class Stream(msgspec.Struct, frozen=True):
    """A stream's row, locked."""

    id: int
    epoch: int
    acked: int


# --- open and fence -------------------------------------------------------------------------------------


def open_stream(
    d: Dialect, name: str, epoch: int | None, above: int, *, now: int | None, again: bool
) -> Steps[tuple[int, int]]:
    """`again`: an earlier try may have been committed, so that a given epoch may be ours already."""
    stream = yield from find(d, name, lock=True)
    if stream is None:
        yield Query(d.sql(sql.CREATE), {"name": name})
        stream = yield from find(d, name, lock=True)
        assert stream is not None
    if epoch is None:
        epoch = max(stream.epoch, above) + 1
    elif stream.epoch > epoch or (stream.epoch == epoch and not again):
        raise _fenced(name, epoch, stream.epoch)
    yield Query(d.sql(sql.OPEN), {"stream": stream.id, "epoch": epoch, "now": now})
    return epoch, stream.acked


def find(d: Dialect, name: str, *, lock: bool) -> Steps[Stream | None]:
    rows = yield Query(d.sql(sql.LOCK if lock else sql.LOOK), {"name": name})
    return Stream(*map(int, rows[0])) if rows else None


def fence(d: Dialect, name: str, epoch: int, *, lock: bool = True) -> Steps[Stream]:
    stream = yield from find(d, name, lock=lock)
    if stream is None:
        raise UnknownStream(f"there is no stream {name!r} in this database; was the database replaced?")
    if stream.epoch != epoch:
        raise _fenced(name, epoch, stream.epoch)
    return stream


def _fenced(name: str, epoch: int, other: int) -> StreamFenced:
    return StreamFenced(
        f"stream {name!r}: this driver has epoch {epoch}, and the stream was opened by another one or released "
        f"since (epoch {other}); nothing was written. Let one query alone use the name; if this is the one that "
        "should run, start it again"
    )


# --- what it holds --------------------------------------------------------------------------------------


def recorded(d: Dialect, name: str, epoch: int, seq: int) -> Steps[StreamClaim | None]:
    stream = yield from fence(d, name, epoch, lock=False)
    return (yield from claim_of(d, stream, seq))


def claim_of(d: Dialect, stream: Stream, seq: int) -> Steps[StreamClaim | None]:
    rows = yield Query(d.sql(sql.RECORDS), {"stream": stream.id})
    for number, messages, slices, claimed_at in rows:
        if number == seq:
            return StreamClaim(
                stream=stream.id,
                seq=seq,
                messages=messages,
                slices=msgspec.json.decode(slices, type=tuple[Slice, ...]),
                claimed_us=claimed_at,
            )
    return None


def make_room(d: Dialect) -> Steps[None]:
    if d.fused:
        yield Query(d.sql(sql.FUSED_MEMORY), {})


# --- outcomes -------------------------------------------------------------------------------------------


def record_outcomes(d: Dialect, name: str, outcomes: Sequence[Recorded]) -> Steps[set[Any]]:
    """Note outcomes beside the claim that is worked on; returns the ids that are not of it."""
    rows = yield Query(d.sql(sql.OPEN_CLAIM), {"name": name})
    if not rows:
        raise UnknownStream(f"there is no stream {name!r} in this database; check the name and the url")
    stream, seq = rows[0]
    last = {o.id: o for o in outcomes}
    if seq is None:
        return set(last)
    key = {"stream": stream, "seq": seq}
    found = {d.id_out(row[0]) for row in (yield Query(d.sql(sql.HAS), {**key, "ids": [d.id_in(i) for i in last]}))}
    values = [
        (
            d.id_in(o.id),
            o.outcome,
            None if o.delay is None else micros(o.delay, "delay"),
            short_error(o.reason),
        )
        for o in last.values()
        if o.id in found
    ]
    if values:
        yield d.note_outcomes(key, values)
    return last.keys() - found


def ack(
    d: Dialect,
    name: str,
    epoch: int,
    seq: int,
    *,
    unsettled: Settlement,
    messages: int | None,
    now: int | None,
) -> Steps[None]:
    """Apply the outcomes of the claims up to this one, and forget them."""
    stream = yield from fence(d, name, epoch)
    if seq < stream.acked:
        raise stream_behind(name, seq, stream.acked)
    if seq == stream.acked:
        return
    held: Rows = yield Query(d.sql(sql.RECORDS), {"stream": stream.id})
    counts = {int(row[0]): int(row[1]) for row in held}
    if messages is not None and counts.get(seq, 0) != messages:
        raise claim_lost(name, seq, messages, counts.get(seq, 0))
    if counts:
        yield from make_room(d)
    for number in counts:
        if number <= seq:
            yield from _settle(d, {"stream": stream.id, "seq": number}, unsettled, now)
    yield Query(d.sql(sql.ACKED), {"stream": stream.id, "seq": seq})


def _settle(d: Dialect, key: dict[str, Any], unsettled: Settlement, now: int | None) -> Steps[None]:
    (counts,) = yield Query(d.sql(sql.OUTCOMES), key)
    names: tuple[Settlement, ...] = ("ack", "nack", "reject", unsettled)
    present = {name for name, count in zip(names, counts, strict=True) if count}
    chosen = {**key, "unsettled": unsettled, "now": now}
    if "ack" in present:
        yield from _move(d, {**chosen, "outcome": "ack", "state": State.COMPLETED.value, "reason": None})
    if "reject" in present:
        yield from _move(d, {**chosen, "outcome": "reject", "state": State.FAILED.value, "reason": _NO_OUTCOME})
    if "nack" in present:
        yield Query(d.sql(sql.RETRY), {**chosen, "outcome": "nack"})
    yield from _drop(d, key)


def _move(d: Dialect, chosen: dict[str, Any]) -> Steps[None]:
    if d.fused:
        yield Query(d.sql(sql.FUSED_COMPLETE if chosen["outcome"] == "ack" else sql.FUSED_FAIL), chosen)
    else:
        yield Query(d.sql(sql.KEEP), chosen)
        yield Query(d.sql(sql.REMOVE), chosen)


def _drop(d: Dialect, key: dict[str, Any]) -> Steps[None]:
    yield Query(d.sql(sql.DROP_MESSAGES), key)
    yield Query(d.sql(sql.DROP_CLAIM), key)


# --- the operator's verbs -------------------------------------------------------------------------------


def release(d: Dialect, name: str) -> Steps[int]:
    """Fence out the driver, if there is one, and give back what the stream holds; returns how many."""
    stream = yield from find(d, name, lock=True)
    if stream is None:
        known = [row[0] for row in (yield Query(d.sql(sql.STATUS), {"now": None}))]
        there = f"there are {', '.join(dict.fromkeys(map(repr, known)))}" if known else "there is none"
        raise UnknownStream(f"there is no stream {name!r} in this database; {there}")
    yield Query(d.sql(sql.RELEASED), {"stream": stream.id})
    total = 0
    for seq, messages, _, _ in (yield Query(d.sql(sql.RECORDS), {"stream": stream.id})):
        key = {"stream": stream.id, "seq": seq}
        yield Query(d.sql(sql.GIVE_BACK), key)
        yield from _drop(d, key)
        total += int(messages)
    return total


def status(d: Dialect, now: int | None) -> Steps[list[StreamStatus]]:
    rows = yield Query(d.sql(sql.STATUS), {"now": now})
    by_name: dict[str, list[Sequence[Any]]] = {}
    for row in rows:
        by_name.setdefault(row[0], []).append(row)
    return [
        StreamStatus(
            name=name,
            epoch=claims[0][1],
            acked_seq=claims[0][2],
            opened_us=claims[0][3],
            held=sum(int(row[5] or 0) for row in claims),
            held_for=None if claims[0][6] is None else max(0, claims[0][7] - claims[0][6]) / SECOND,
        )
        for name, claims in by_name.items()
    ]
