"""The number of slices of a read and their bounds; the statement that reads one slice of a stream's claim."""

from __future__ import annotations

from typing import Any

from millpond.seam.arrow import Piece
from millpond.seam.streams import ClaimSlice
from millpond.transports.database.sql.dialect import Dialect, Named

SLICE_BYTES = 256 << 20
"""A task reads this many bytes in about a second."""

# The rows of a slice: those of one task, the same at each replay.
_IN_SLICE = "WHERE s.stream = :stream AND s.seq = :seq AND s.id >= :first"
_CLAIM_SLICE = Named(
    "slice of claim",
    f"FROM {{message}} WHERE id {{in_select}} SELECT s.id FROM {{stream_message}} s {_IN_SLICE} {{end_select}}",
)
_CLAIM_SLICE_UP_TO = Named("slice of claim up to", _CLAIM_SLICE.replace(":first", ":first AND s.id < :stop"))


def count(size: int, at_least: int) -> int:
    """Number of slices: a multiple of `at_least`, which that many cores share evenly."""
    return at_least * max(1, -(-size // (at_least * SLICE_BYTES)))


def ranges(low: int, high: int, parts: int) -> list[tuple[int | None, int | None]]:
    """Bounds (from, below) that cover everything: the first has no lower one, the last no upper one."""
    step = max(1, -(-(high - low + 1) // parts))
    inner = list(range(low + step, high + 1, step))
    return list(zip([None, *inner], [*inner, None], strict=True))


def claim_piece(d: Dialect, stream: int, seq: int, slice_: ClaimSlice) -> Piece:
    text = _CLAIM_SLICE if slice_.stop is None else _CLAIM_SLICE_UP_TO
    params: dict[str, Any] = {"stream": stream, "seq": seq, "first": d.id_in(slice_.first)}
    if slice_.stop is not None:
        params["stop"] = d.id_in(slice_.stop)
    return Piece(d.own(text), params)
