"""Supervise several workers: restart one that dies, stop all together.

Subclasses decide where a worker runs: in a process of this machine, or in a task of a Spark cluster.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal

import msgspec

from millpond.clock import monotonic
from millpond.loop import Backoff, until_stopped
from millpond.worker.status import Status

log = logging.getLogger("millpond.run")

_STABLE = 60.0
"""Lifetime in seconds after which a worker's death counts as its first: the pause before the next starts anew."""
KILL_AFTER = 15.0
"""Seconds beyond the time granted to handlers after which a worker that does not end is killed."""
WRONG_COMMAND = 2


class WorkerSlot:
    """One worker and its status; after its death, the next one."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.occupied = False
        self.status = Status()
        self.earlier = Status()
        """Counts of the workers that were here before."""
        self.code = 0
        self.last_output = ""
        """The last line of the worker that ended, if it is not in a log of this machine."""

    def receive_status(self, line: bytes) -> None:
        """Store a status. A line that is incomplete, because the worker died, is ignored."""
        with contextlib.suppress(msgspec.DecodeError):
            self.status = msgspec.json.decode(line, type=Status)

    def clear(self) -> None:
        """Make the slot free for the next worker."""
        done = self.earlier + self.status
        self.occupied = False
        self.earlier, self.status = Status(counts=done.counts), Status()


class Supervisor:
    """Keeps a number of workers alive until stopped or, with `until_idle`, until each has ended by itself."""

    def __init__(self, workers: int, *, grace: float, until_idle: bool) -> None:
        self._slots = [self._new_slot(number) for number in range(1, workers + 1)]
        self._grace = grace
        self._until_idle = until_idle
        self._stopping = asyncio.Event()
        self._stops = 0
        """Number of calls of `stop`."""
        self._kill_at = 0.0
        self._code = 0

    def _new_slot(self, number: int) -> WorkerSlot:
        return WorkerSlot(number)

    async def _run_worker(self, slot: WorkerSlot) -> int:
        """Run one worker to its end; its exit code, or minus the signal that killed it."""
        raise NotImplementedError

    def _send_stop(self, slot: WorkerSlot) -> None:
        """Pass a stop on to a worker: the first, second or third, by `_stops`."""
        raise NotImplementedError

    @property
    def status(self) -> Status:
        return sum((slot.earlier + slot.status for slot in self._slots), Status())

    @property
    def size(self) -> int:
        return len(self._slots)

    @property
    def running(self) -> int:
        return sum(slot.occupied for slot in self._slots)

    @property
    def last_output(self) -> str:
        return next((slot.last_output for slot in self._slots if slot.code and slot.last_output), "")

    def stop(self) -> None:
        """The first call lets handlers finish, the second interrupts them, the third kills every worker."""
        self._stops += 1
        self._kill_at = monotonic() + KILL_AFTER + (self._grace if self._stops == 1 else 0.0)
        self._stopping.set()
        for slot in self._slots:
            self._send_stop(slot)

    @property
    def _must_kill(self) -> bool:
        return self._stopping.is_set() and monotonic() >= self._kill_at

    async def run(self) -> int:
        """Run until all workers have ended; the exit code."""
        async with asyncio.TaskGroup() as group:
            for slot in self._slots:
                group.create_task(self._keep_occupied(slot))
        return self._code or max((1 if slot.code else 0 for slot in self._slots), default=0)

    async def _keep_occupied(self, slot: WorkerSlot) -> None:
        backoff = Backoff(0.5, 30.0)
        while not self._stopping.is_set():
            began = monotonic()
            slot.code = await self._run_worker(slot)
            if self._stopping.is_set():
                if slot.code == -signal.SIGTERM:  # stopped before it handled signals: it had nothing to finish
                    slot.code = 0
                return
            if self._until_idle and slot.code == 0:
                return
            if slot.code == WRONG_COMMAND:  # a restart would fail in the same way
                if slot.last_output:
                    log.error("worker %d cannot work: %s", slot.number, slot.last_output)
                self._code = WRONG_COMMAND
                self.stop()
                return
            if monotonic() - began >= _STABLE:
                backoff.reset()
            pause = backoff.next()
            how = ": ".join(filter(None, [describe_exit(slot.code), slot.last_output]))
            log.error("worker %d ended (%s); another one starts in %.1f s", slot.number, how, pause)
            await until_stopped(self._stopping, asyncio.sleep(pause))


def describe_exit(code: int) -> str:
    if code >= 0:
        return f"exit code {code}"
    try:
        return f"killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"killed by signal {-code}"
