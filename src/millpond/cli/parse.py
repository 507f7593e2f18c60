"""Parse command line values: durations, times, headers, ids."""

from __future__ import annotations

import re
from collections.abc import Sequence
from datetime import datetime, timedelta
from uuid import UUID

from millpond.errors import InvalidMessage, InvalidTime

_DURATION = re.compile(r"(\d+(?:\.\d+)?)(ms|s|m|h|d|w)?")
_SECONDS = {"ms": 0.001, "s": 1, "m": 60, "h": 3600, "d": 86_400, "w": 7 * 86_400}


def duration(text: str | None, option: str) -> timedelta | None:
    """
    >>> duration("1.5h", "--delay")
    datetime.timedelta(seconds=5400)
    """
    if text is None:
        return None
    match = _DURATION.fullmatch(text.strip())
    if match is None:
        raise InvalidTime(f"{option} {text!r} is not a duration; write it as 30s, 15m, 12h or 7d")
    try:
        return timedelta(seconds=float(match[1]) * _SECONDS[match[2] or "s"])
    except OverflowError:
        raise InvalidTime(f"{option} {text!r} is too long; the maximum is 100 years") from None


def parse_time(text: str | None, option: str) -> datetime | None:
    """
    >>> parse_time("2030-01-31T08:00:00Z", "--due-at").hour
    8
    """
    if text is None:
        return None
    try:
        value = datetime.fromisoformat(text)
    except ValueError:
        raise InvalidTime(f"{option} {text!r} is not a time; write it as 2030-01-31T08:00:00Z") from None
    if value.tzinfo is None:
        raise InvalidTime(f"{option} {text!r} has no time zone; add Z for UTC, or an offset such as +02:00")
    return value


def duration_or_time(text: str | None, option: str) -> timedelta | datetime | None:
    if text is None or _DURATION.fullmatch(text.strip()):
        return duration(text, option)
    try:
        datetime.fromisoformat(text)
    except ValueError:
        raise InvalidTime(
            f"{option} {text!r} is neither a duration (30s, 7d) nor a time (2030-01-31T08:00:00Z)"
        ) from None
    return parse_time(text, option)


def headers(pairs: Sequence[str]) -> dict[str, str]:
    result = {}
    for pair in pairs:
        name, equals, value = pair.partition("=")
        if not equals or not name:
            raise InvalidMessage(f"--header {pair!r} must be written as name=value")
        result[name] = value
    return result


def ids(texts: Sequence[str]) -> list[UUID]:
    return list(dict.fromkeys(map(_id, texts)))


def _id(text: str) -> UUID:
    try:
        return UUID(text)
    except ValueError:
        raise InvalidMessage(
            f"the id {text[:80]!r} is not a UUID; millpond publish and millpond list print the ids of messages"
        ) from None
