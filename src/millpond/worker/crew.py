"""Several workers kept at work: each in its place, replaced when it dies, told to stop all together.

Where they run is for others to say: in processes of this machine, or in tasks of a Spark cluster.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
from collections import Counter
from collections.abc import Mapping

import msgspec

from millpond.clock import monotonic

log = logging.getLogger("millpond.run")

_PAUSE, _LONGEST_PAUSE = 0.5, 30.0
_STABLE = 60.0
"""Seconds that a worker must have lived for its death to count as the first one again."""
KILL_AFTER = 15.0
"""Seconds beyond the time granted to handlers after which a worker that does not end is killed."""
WRONG_COMMAND = 2


class Status(msgspec.Struct, frozen=True):
    """What one worker says of itself."""

    ready: bool = False
    in_flight: int = 0
    counts: Mapping[str, int] = {}

    def __add__(self, other: Status) -> Status:
        counts = Counter(self.counts)
        counts.update(other.counts)
        return Status(self.ready or other.ready, self.in_flight + other.in_flight, counts)


class Place:
    """Where one worker works; after its death, the next."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.taken = False
        self.status = Status()
        self.before = Status()
        """What the predecessors did."""
        self.code = 0
        self.last_words = ""
        """What the last one said at its end, where nobody else would see it."""

    def hear(self, line: bytes) -> None:
        """The worker tells its status; a line that its death cut off tells nothing."""
        with contextlib.suppress(msgspec.DecodeError):
            self.status = msgspec.json.decode(line, type=Status)

    def leave(self) -> None:
        done = self.before + self.status
        self.taken = False
        self.before, self.status = Status(counts=done.counts), Status()


class Crew:
    """Keeps so many workers at work until told to stop, or until they have nothing more to do."""

    def __init__(self, workers: int, *, grace: float, until_idle: bool) -> None:
        self._places = [self._place(number) for number in range(1, workers + 1)]
        self._grace = grace
        self._until_idle = until_idle
        self._stopping = asyncio.Event()
        self._signals = 0
        self._kill_at = 0.0
        self._code = 0

    def _place(self, number: int) -> Place:
        return Place(number)

    async def _live(self, place: Place) -> int:
        """The life of one worker; its exit code, or minus the signal that killed it."""
        raise NotImplementedError

    def _tell_to_stop(self, place: Place) -> None:
        """Pass on what `stop` was told: by then `_signals` times."""
        raise NotImplementedError

    @property
    def status(self) -> Status:
        return sum((place.before + place.status for place in self._places), Status())

    @property
    def size(self) -> int:
        return len(self._places)

    @property
    def running(self) -> int:
        return sum(place.taken for place in self._places)

    @property
    def last_words(self) -> str:
        return next((place.last_words for place in self._places if place.code and place.last_words), "")

    def stop(self) -> None:
        """The first time means finish, the second interrupt; the third ends every worker at once."""
        self._signals += 1
        self._kill_at = monotonic() + KILL_AFTER + (self._grace if self._signals == 1 else 0.0)
        self._stopping.set()
        for place in self._places:
            self._tell_to_stop(place)

    @property
    def _time_is_over(self) -> bool:
        return self._stopping.is_set() and monotonic() >= self._kill_at

    async def run(self) -> int:
        """Until all have ended; gives the exit code."""
        async with asyncio.TaskGroup() as group:
            for place in self._places:
                group.create_task(self._keep(place))
        return self._code or max((1 if place.code else 0 for place in self._places), default=0)

    async def _keep(self, place: Place) -> None:
        pause = _PAUSE
        while not self._stopping.is_set():
            began = monotonic()
            place.code = await self._live(place)
            if self._stopping.is_set():
                if place.code == -signal.SIGTERM:  # told to stop before it could listen, it had nothing to finish
                    place.code = 0
                return
            if self._until_idle and place.code == 0:
                return
            if place.code == WRONG_COMMAND:  # it would be as wrong the next time; it has said what it is
                if place.last_words:
                    log.error("worker %d cannot work: %s", place.number, place.last_words)
                self._code = WRONG_COMMAND
                self.stop()
                return
            if monotonic() - began >= _STABLE:
                pause = _PAUSE
            how = ": ".join(filter(None, [_named(place.code), place.last_words]))
            log.error("worker %d ended (%s); another one starts in %.1f s", place.number, how, pause)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(pause):
                    await self._stopping.wait()
            pause = min(pause * 2, _LONGEST_PAUSE)


def _named(code: int) -> str:
    if code >= 0:
        return f"exit code {code}"
    try:
        return f"killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"killed by signal {-code}"
