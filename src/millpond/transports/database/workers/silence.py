"""How long other workers have been silent, as one reaper observes it. Steps of the database's clock do not count."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from millpond.clock import SECOND

FRESH = 1.0
"""Seconds. A worker whose last beat is younger is not silent."""
_LONGEST_PAUSE = 5.0
"""Seconds between two checks. After a longer pause the observation begins again: the database may have been away."""
_STEP = 0.5
"""Seconds by which the database's clock and ours may differ between two checks. More is a step, or a slow answer."""


class Beat(msgspec.Struct, frozen=True):
    """The last beat of a silent worker."""

    number: int
    age: float
    """Seconds by the database's clock."""


class Silent(msgspec.Struct, frozen=True):
    """The silence of one worker."""

    seconds: float
    seen: bool
    """It has beaten since the observation began."""


class _Since(msgspec.Struct, frozen=True):
    number: int
    time: float
    seen: bool


class Silence:
    """Observes the beats of other workers.

    A worker is silent as long as the number of its beat does not change, by the clock of this process. The age of a
    beat counts only when it is new here, and only if the database's clock made no step since the last check.
    """

    def __init__(self) -> None:
        self._silent: dict[int, _Since] = {}
        self._last: tuple[float, int] | None = None
        """Our time and the database's time of the last check."""

    def restart(self) -> None:
        self._silent, self._last = {}, None

    def observe(self, beats: Mapping[int, Beat], at: int, now: float) -> dict[int, Silent]:
        """Silence of each worker. `beats`: of those that seem silent; `at`: the database's time; `now`: our time."""
        if self._last is not None and now - self._last[0] > _LONGEST_PAUSE:
            self.restart()
        before, self._last = self._last, (now, at)
        old, self._silent = self._silent, {}
        for worker, beat in beats.items():
            since = old.get(worker)
            if since is None or since.number != beat.number:
                since = _Since(beat.number, now - _already(beat, before, at, now), before is not None)
            self._silent[worker] = since
        return {worker: Silent(now - since.time, since.seen) for worker, since in self._silent.items()}


def _already(beat: Beat, before: tuple[float, int] | None, at: int, now: float) -> float:
    """Seconds of silence at the first check of a beat."""
    if before is None:
        return 0.0
    elapsed = now - before[0]
    if abs((at - before[1]) / SECOND - elapsed) > _STEP:
        return 0.0
    return min(max(beat.age, 0.0), elapsed + FRESH)  # at the last check it was fresh, or there was another beat
