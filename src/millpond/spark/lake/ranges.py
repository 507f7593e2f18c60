"""Cuts an exported range into pieces with their numbers of messages, which a purge checks one by one."""

from __future__ import annotations

from collections.abc import Mapping

from millpond.clock import SECOND
from millpond.seam.exports import ExportedRange

MINUTE = 60 * SECOND
_HOUR = 60
"""In minutes."""
_MOST = 50_000
"""Messages after which a piece ends: a check reads all of them."""


def pieces(since: int | None, until: int, by_minute: Mapping[int, int]) -> list[ExportedRange]:
    """Pieces that cover [since, until): each has messages of one hour at most.

    `by_minute`: minute since 1970 -> number of messages. A piece without messages may be longer.

    >>> [(p.since_us, p.until_us // MINUTE, p.messages) for p in pieces(None, 90 * MINUTE, {50: 1, 59: 2, 61: 4})]
    [(None, 0, 0), (0, 60, 3), (3600000000, 90, 4)]
    """
    found: list[ExportedRange] = []
    start, messages, hour = since, 0, None

    def cut(minute: int) -> None:
        nonlocal start, messages
        at = minute * MINUTE
        if at < until and (start is None or start < at):
            found.append(ExportedRange(start, at, messages))
            start, messages = at, 0

    for minute, rows in sorted(by_minute.items()):
        if minute // _HOUR != hour:
            # Two cuts where hours have no messages: where days are partitions, the messages of a piece are in one.
            if hour is not None:
                cut((hour + 1) * _HOUR)
            cut(minute // _HOUR * _HOUR)
        elif messages >= _MOST:
            cut(minute)
        hour = minute // _HOUR
        messages += rows
    if hour is not None:
        cut((hour + 1) * _HOUR)
    found.append(ExportedRange(start, until, messages))
    return found
