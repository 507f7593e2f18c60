"""Settled messages of the last days, counted in the files of a lake. A file never changes, so each is read once."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable, Coroutine, Mapping
from datetime import UTC, date, datetime, timedelta
from typing import Any, Protocol

from millpond.clock import SystemClock, as_datetime, monotonic, time_us
from millpond.control.history import FREE, KINDS, SHARE, SettledCounts
from millpond.message import State
from millpond.seam.operations import SettledBucket

log = logging.getLogger("millpond.control")


class LakeFiles(Protocol):
    """The files of a lake. Both calls block."""

    def days(self, since: date) -> Mapping[str, date]:
        """File -> day of its messages, for the files of this day and later ones."""

    def count(self, file: str) -> Mapping[tuple[str, str], int]:
        """(queue, state) -> number of messages in a file."""


class ExportedDays:
    """Counts of one lake. `in_background` runs the task that counts."""

    def __init__(
        self, files: LakeFiles, in_background: Callable[[Coroutine[Any, Any, Any], str], asyncio.Task[Any]]
    ) -> None:
        self._files = files
        self._in_background = in_background
        self._listed: Mapping[str, date] = {}
        self._counted: dict[str, Mapping[tuple[str, str], int]] = {}
        self._is_listed = False
        self._unreadable = False
        self._read_at = -math.inf
        self._task: asyncio.Task[Any] | None = None

    @property
    def is_known(self) -> bool:
        """Whether there are counts to show, or there was an error."""
        return self._is_listed or self._unreadable

    async def counts(self, reaches: Callable[[str], bool], *, within: float) -> SettledCounts:
        """Sums of the queues that `reaches` allows. It waits for counts at most so many seconds."""
        if self._task is not None and self._task.done():
            self._task = None
        if self._task is None and monotonic() - self._read_at > KINDS["day"].same_for:
            self._task = self._in_background(self._count(), "history of the lake")
        if self._task is not None and within:
            await asyncio.wait([self._task], timeout=within)
        return self._sum(reaches)

    async def _count(self) -> None:
        """Count the files that are new, the newest days first."""
        try:
            self._listed = await asyncio.to_thread(self._files.days, _days()[0])
            self._counted = {file: found for file, found in self._counted.items() if file in self._listed}
            self._is_listed = True
            began, took = monotonic(), 0.0
            for file in sorted(self._listed.keys() - self._counted.keys(), key=self._newest_first):
                if monotonic() - began > FREE:
                    await asyncio.sleep(took * (SHARE - 1))
                step = monotonic()
                self._counted[file] = await asyncio.to_thread(self._files.count, file)
                took = monotonic() - step
            self._unreadable = False
        except Exception as e:  # of the lake's store; the pages show what was counted
            self._unreadable = True
            log.warning("the lake was not counted: %s", e)
        finally:
            self._read_at = monotonic()

    def _newest_first(self, file: str) -> tuple[int, str]:
        return -self._listed[file].toordinal(), file

    def _sum(self, reaches: Callable[[str], bool]) -> SettledCounts:
        sums = {day: {State.COMPLETED.value: 0, State.FAILED.value: 0} for day in _days()}
        unknown = {day for file, day in self._listed.items() if file not in self._counted}
        for file, found in self._counted.items():
            by_state = sums.get(self._listed[file], {})
            for (queue, state), number in found.items():
                if state in by_state and reaches(queue):
                    by_state[state] += number
        return SettledCounts(
            by="day",
            buckets=tuple(
                SettledBucket(
                    begin_us=_begin_us(day),
                    completed=by_state[State.COMPLETED.value],
                    failed=by_state[State.FAILED.value],
                    at_least=day in unknown,
                )
                for day, by_state in sums.items()
            )
            if self.is_known
            else (),
            complete=self._is_listed and not unknown and not self._unreadable,
            unreadable=self._unreadable,
        )


def _days() -> list[date]:
    """The days that are shown, in UTC, oldest first."""
    today = as_datetime(SystemClock().now()).astimezone(UTC).date()
    number = KINDS["day"].number
    return [today - timedelta(days=number - 1 - n) for n in range(number)]


def _begin_us(day: date) -> int:
    return time_us(datetime(day.year, day.month, day.day, tzinfo=UTC), "day")
