"""The supervisor of several worker processes: starts them, restarts those that die, passes signals on.

A worker has a session of its own, so that Ctrl-C reaches it through the supervisor only. It reads its standard
input, which ends when the supervisor dies, and then stops too; it tells its status through a pipe.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import sys
from collections.abc import Callable, Sequence

import msgspec

from millpond.cli.progress import Status
from millpond.clock import monotonic

log = logging.getLogger("millpond.run")

_PAUSE, _LONGEST_PAUSE = 0.5, 30.0
_STABLE = 60.0
"""Seconds that a worker must have lived for its death to count as the first one again."""
_KILL_AFTER = 15.0
"""Seconds beyond the time granted to handlers after which a worker that does not end is killed."""
WRONG_COMMAND = 2


class Place:
    """Where one worker runs; after its death, the next."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.process: asyncio.subprocess.Process | None = None
        self.status = Status()
        self.before = Status()
        """What the predecessors did."""
        self.code = 0

    def ended(self) -> None:
        done = self.before + self.status
        self.process = None
        self.before, self.status = Status(counts=done.counts), Status()


class Supervisor:
    """Keeps so many workers running until told to stop, or until they have nothing more to do."""

    def __init__(
        self, command: Sequence[str], workers: int, *, grace: float, until_idle: bool, say: Callable[[str], None] | None
    ) -> None:
        self._command = command
        self._grace = grace
        self._until_idle = until_idle
        self._say = say
        """Where the workers' logs go; None: to our own standard error."""
        self._places = [Place(number) for number in range(1, workers + 1)]
        self._stopping = asyncio.Event()
        self._signals = 0
        self._kill_at = 0.0
        self._code = 0

    @property
    def status(self) -> Status:
        return sum((place.before + place.status for place in self._places), Status())

    @property
    def running(self) -> int:
        return sum(place.process is not None for place in self._places)

    def stop(self) -> None:
        """Pass a signal on: the first means finish, the second interrupt; the third ends every worker at once."""
        self._signals += 1
        self._kill_at = monotonic() + _KILL_AFTER + (self._grace if self._signals == 1 else 0.0)
        self._stopping.set()
        for place in self._places:
            if place.process is not None:
                _signal(place.process, signal.SIGTERM if self._signals < 3 else signal.SIGKILL)

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
                self._code = WRONG_COMMAND
                self.stop()
                return
            if monotonic() - began >= _STABLE:
                pause = _PAUSE
            log.error("worker %d ended (%s); another one starts in %.1f s", place.number, _named(place.code), pause)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(pause):
                    await self._stopping.wait()
            pause = min(pause * 2, _LONGEST_PAUSE)

    async def _live(self, place: Place) -> int:
        """The life of one process."""
        ours, its = os.pipe()
        try:
            process = await asyncio.create_subprocess_exec(
                *self._command,
                "--supervised",
                f"{place.number}:{its}",
                stdin=asyncio.subprocess.PIPE,
                stderr=None if self._say is None else asyncio.subprocess.PIPE,
                pass_fds=[its],
                start_new_session=True,
            )
        except BaseException:
            os.close(ours)
            raise
        finally:
            os.close(its)
        place.process = process
        log.info("worker %d started, process %d", place.number, process.pid)
        if self._stopping.is_set():
            _signal(process, signal.SIGTERM)
        listening = [asyncio.create_task(self._listen(place, ours))]
        if process.stderr is not None:
            listening.append(asyncio.create_task(self._pass_on(process.stderr)))
        try:
            while process.returncode is None:
                limit = max(self._kill_at - monotonic(), 0.01) if self._stopping.is_set() else 0.5
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(min(limit, 0.5)):
                        await process.wait()
                if process.returncode is None and self._stopping.is_set() and monotonic() >= self._kill_at:
                    log.error("worker %d does not end and is killed", place.number)
                    _signal(process, signal.SIGKILL)
                    await process.wait()
        finally:
            _signal(process, signal.SIGKILL)  # only if we are torn down ourselves
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(1.0):  # a grandchild may hold the other end
                    await asyncio.gather(*listening, return_exceptions=True)
            for task in listening:
                task.cancel()
            place.ended()
        return process.returncode or 0

    async def _listen(self, place: Place, pipe: int) -> None:
        reader = asyncio.StreamReader()
        transport, _ = await asyncio.get_running_loop().connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(pipe, "rb")
        )
        try:
            while text := await reader.readline():
                with contextlib.suppress(msgspec.DecodeError):  # cut off by its death
                    place.status = msgspec.json.decode(text, type=Status)
        finally:
            transport.close()

    async def _pass_on(self, stderr: asyncio.StreamReader) -> None:
        assert self._say is not None
        while text := await stderr.readline():
            self._say(text.decode(errors="replace").rstrip("\n"))


def _signal(process: asyncio.subprocess.Process, number: int) -> None:
    if process.returncode is None:
        with contextlib.suppress(ProcessLookupError):
            process.send_signal(number)


def _named(code: int) -> str:
    if code >= 0:
        return f"exit code {code}"
    try:
        return f"killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"killed by signal {-code}"


def own_command(arguments: Sequence[str]) -> list[str]:
    """The command line that starts this very program again."""
    return [sys.executable, "-m", "millpond", *arguments]
