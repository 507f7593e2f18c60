"""Rows that fail every statement which concerns them: a corrupt row, or a user's trigger that refuses it.

They are left out of the statements for other rows, and tried again alone, after growing pauses.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeVar

from millpond.clock import monotonic
from millpond.halves import Halved, by_halves

log = logging.getLogger("millpond")

T = TypeVar("T")

_FIRST_PAUSE, _LONGEST_PAUSE = 5.0, 60.0
_RETRIES = 3
"""Maximum number of rows, whose fault is proven, that one call tries again."""
_FORGET_AFTER = 60.0
"""Seconds after its pause in which a row that is not seen again is forgotten."""


class _Row:
    """A refused row. `until`: monotonic end of its pause."""

    __slots__ = ("failures", "pause", "proven", "successes", "until")

    def __init__(self) -> None:
        self.pause = _FIRST_PAUSE
        self.until = 0.0
        self.successes = -1
        """Number of calls that wrote something, at its last failure."""
        self.failures = 0
        """Number of failures since that is proven:"""
        self.proven = False
        """Others were written then or since: the cause is in this row."""


class RefusedRows:
    """The refused rows of one kind of write. `what` is logged: "messages cannot be claimed"."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._rows: dict[Any, _Row] = {}
        self._successes = 0

    def __len__(self) -> int:
        """Their number, without rows that were not seen again: another program has repaired or settled those."""
        now = monotonic()
        for id_ in [id_ for id_, row in self._rows.items() if now > row.until + _FORGET_AFTER]:
            del self._rows[id_]
        return len(self._rows)

    def repeated(self) -> list[Any]:
        """Rows that failed at least twice although others were written."""
        return [id_ for id_, row in self._rows.items() if row.failures > 1]

    def discard(self, id_: Any) -> None:
        self._rows.pop(id_, None)

    async def write(
        self,
        write: Callable[[Sequence[Any]], Awaitable[T]],
        ids: Sequence[Any],
        *,
        enough: Callable[[T], bool] = lambda result: False,
    ) -> list[T]:
        """Write rows, without those whose pause lasts; returns the results of the parts that were written.

        An error is raised if nothing was written, unless it concerns only rows that are known to be refused.
        """
        others = [id_ for id_ in ids if id_ not in self._rows]
        due = [id_ for id_ in ids if id_ in self._rows and (self._rows[id_].until <= monotonic())]
        known = [id_ for id_ in due if self._rows[id_].proven][:_RETRIES]
        # Together, and after the others: perhaps nothing could be written when they failed.
        unsure = [id_ for id_ in (ids if others else due) if id_ in self._rows and not self._rows[id_].proven]
        halved = await by_halves(write, [*([id_] for id_ in known), others, unsure], enough=enough)
        self._record(halved)
        if halved.error is not None and not halved.done and not set(known).issuperset([*halved.alone, *halved.left]):
            raise halved.error
        return [result for _, result in halved.done]

    def _record(self, halved: Halved[Any, Any]) -> None:
        for part, _ in halved.done:
            for id_ in part:
                self._rows.pop(id_, None)
        if halved.done:
            self._successes += 1
            for row in self._rows.values():
                if not row.proven:
                    row.until = 0.0
        now = monotonic()
        for id_ in halved.alone:
            row = self._rows.setdefault(id_, _Row())
            row.proven = row.proven or bool(halved.done) or self._successes > row.successes >= 0
            row.until, row.successes = now + row.pause, self._successes
            if row.proven:
                row.failures += 1
                row.pause = min(2 * row.pause, _LONGEST_PAUSE)
        if halved.alone:
            error = next(iter(halved.alone.values()))
            log.warning("%s: %d, tried again later (%s)", self._what, len(halved.alone), error)
