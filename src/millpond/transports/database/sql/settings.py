"""The columns of a queue's settings: read from a row, and values to store."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, TypeVar

from msgspec import UNSET, UnsetType

from millpond.checks import integer
from millpond.clock import SECOND, Seconds, micros
from millpond.errors import InvalidOption, InvalidTime
from millpond.retry import Retry
from millpond.seam.settings import QueueSettings
from millpond.transports.validation import lease_to_claim

T = TypeVar("T")
log = logging.getLogger("millpond")

_HIGHEST_LIMIT = 1_000_000
_RETRY_TIMES = ("initial", "step", "maximum", "total")
_RETRY = ("initial", "multiplier", "step", "maximum", "jitter", "attempts", "total", "first")
SETTINGS = (
    *("name", "paused", "keep_completed", "keep_failed", "lease", "max_crashes", "max_deliveries"),
    *(f"retry_{name}" for name in _RETRY),
)
ALL_SETTINGS = f"SELECT {', '.join(SETTINGS)} FROM {{queue}}"
SETTINGS_OF = f"{ALL_SETTINGS} WHERE name {{queues}}"


def settings_of(row: Sequence[Any]) -> QueueSettings:
    """The settings of a row. A value that another program wrote and that is invalid has no effect, and is logged."""
    name, paused, completed, failed, lease, crashes, deliveries, *retry = row
    return QueueSettings(
        queue=name,
        paused=bool(paused),
        keep_completed_us=_usable(name, "keep_completed", completed, _time),
        keep_failed_us=_usable(name, "keep_failed", failed, _time),
        lease_us=_usable(name, "lease", lease, _lease),
        max_crashes=_usable(name, "max_crashes", crashes, _limit),
        max_deliveries=_usable(name, "max_deliveries", deliveries, _limit),
        retry=_usable(name, "retry", retry, _retry_of),
    )


def _usable(queue: str, column: str, value: Any, read: Callable[[Any, str], T | None]) -> T | None:
    try:
        return None if value is None else read(value, column)
    except (InvalidOption, InvalidTime, TypeError, OverflowError) as e:
        warned_of(queue, column, str(e))
        return None


@lru_cache(maxsize=1024)  # once, not at every reading
def warned_of(queue: str, column: str, error: str) -> None:
    log.warning("setting %s of the queue %r has no effect: %s", column, queue, error)


def _time(value: Any, column: str) -> int:
    micros(integer(value, column) / SECOND, column)
    return int(value)


def _lease(value: Any, column: str) -> int:
    return lease_to_claim(_time(value, column) / SECOND)


def _limit(value: Any, column: str) -> int:
    return integer(value, column, 0, _HIGHEST_LIMIT)


def _retry_of(values: Sequence[Any], _: str) -> Retry | None:
    """A column that is null has the policy's default; all of them null are no policy."""
    given = {name: value for name, value in zip(_RETRY, values, strict=True) if value is not None}
    if not given:
        return None
    for name in _RETRY_TIMES:
        if name in given:
            given[name] = given[name] / SECOND
    if given.get("attempts") == 0:
        given["attempts"] = None
    return Retry(**given)


def changed_columns(
    *,
    lease: Seconds | UnsetType | None,
    retry: Retry | UnsetType | None,
    max_crashes: int | UnsetType | None,
    max_deliveries: int | UnsetType | None,
) -> dict[str, Any]:
    """Columns and values of the given settings, checked."""
    values: dict[str, Any] = {}
    if lease is not UNSET:
        values["lease"] = None if lease is None else lease_to_claim(lease)
    if retry is not UNSET:
        if retry is not None and not isinstance(retry, Retry):
            raise InvalidOption(f"retry must be a Retry, not {type(retry).__name__}")
        values |= _retry_columns(retry)
    for name, limit in (("max_crashes", max_crashes), ("max_deliveries", max_deliveries)):
        if limit is not UNSET:
            values[name] = limit if limit is None else integer(limit, name, 0, _HIGHEST_LIMIT)
    if not values:
        raise InvalidOption("no setting was given: pass lease, retry, max_crashes or max_deliveries")
    return values


def _retry_columns(retry: Retry | None) -> dict[str, Any]:
    """Columns and values of a policy; None removes it."""
    if retry is None:
        return {f"retry_{name}": None for name in _RETRY}
    if retry.never:
        raise InvalidOption("a queue's retry policy has no exception classes: give Retry(never=…) to the subscriber")
    values = {f"retry_{name}": getattr(retry, name) for name in _RETRY}
    for name in _RETRY_TIMES:
        value = getattr(retry, name)
        values[f"retry_{name}"] = None if value is None else micros(value, f"Retry.{name}")
    if retry.attempts is None:
        values["retry_attempts"] = 0
    return values
