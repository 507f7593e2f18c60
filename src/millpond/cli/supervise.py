"""The supervisor of several worker processes: starts them, restarts those that die, passes signals on."""

from __future__ import annotations

import logging
import signal
from collections.abc import Callable, Mapping, Sequence

from millpond.worker.crew import Crew, Place
from millpond.worker.process import WorkerProcess

log = logging.getLogger("millpond.run")


class Supervisor(Crew):
    """A crew in processes of this machine."""

    def __init__(
        self,
        command: Sequence[str],
        workers: int,
        *,
        grace: float,
        until_idle: bool,
        say: Callable[[str], None] | None,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(workers, grace=grace, until_idle=until_idle)
        self._command = command
        self._say = say
        self._environment = environment
        self._processes: dict[Place, WorkerProcess] = {}

    @property
    def pids(self) -> list[int]:
        return [process.pid for process in self._processes.values()]

    def _tell_to_stop(self, place: Place) -> None:
        if place in self._processes:
            self._processes[place].signal(signal.SIGTERM if self._signals < 3 else signal.SIGKILL)

    async def _live(self, place: Place) -> int:
        try:
            process = WorkerProcess(
                self._command, place.number, hear=place.hear, say=self._say, environment=self._environment
            )
            async with process:
                self._processes[place], place.taken = process, True
                log.info("worker %d started, process %d", place.number, process.pid)
                if self._stopping.is_set():
                    process.signal(signal.SIGTERM)
                while (code := await process.wait(0.5)) is None:
                    if self._time_is_over:
                        log.error("worker %d does not end and is killed", place.number)
                        process.signal(signal.SIGKILL)
                return code
        finally:
            self._processes.pop(place, None)
            place.leave()
