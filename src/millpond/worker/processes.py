"""Worker processes (`millpond run --supervised`), and a supervisor of several on this machine.

A worker process has its own session, because Ctrl-C must reach it through its parent only. It stops when its standard
input ends, which happens when the parent dies. It sends its status through a pipe, one line of JSON at a time.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Self

from millpond.worker.supervisor import Supervisor, WorkerSlot

log = logging.getLogger("millpond.run")


def own_command(arguments: Sequence[str]) -> list[str]:
    """The command line that starts this program again."""
    return [sys.executable, "-m", "millpond", *arguments]


def run_arguments(
    target: str, queues: Sequence[str] | None, *, grace: float, until_idle: bool, worker_options: Sequence[str] = ()
) -> list[str]:
    """Arguments of `millpond run` for one worker."""
    arguments = ["run", target, "--graceful-timeout", f"{grace}s", *worker_options]
    if queues is not None:
        arguments += ["--queues", ",".join(queues)]
    return [*arguments, "--until-idle"] if until_idle else arguments


class WorkerProcess:
    """A context that starts the process, and kills it if it is still alive at the end."""

    def __init__(
        self,
        command: Sequence[str],
        number: int,
        *,
        on_status: Callable[[bytes], None],
        on_log: Callable[[str], None] | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self._command = command
        self._number = number
        self._on_status = on_status
        """Called with each line of status."""
        self._on_log = on_log
        """Called with each line of the log; None: the log goes to the parent's standard error."""
        self._environment = environment
        self._listening: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> Self:
        ours, its = os.pipe()
        try:
            self._process = process = await asyncio.create_subprocess_exec(
                *self._command,
                "--supervised",
                f"{self._number}:{its}",
                stdin=asyncio.subprocess.PIPE,
                stderr=None if self._on_log is None else asyncio.subprocess.PIPE,
                pass_fds=[its],
                start_new_session=True,
                env=self._environment,
            )
        except BaseException:
            os.close(ours)
            raise
        finally:
            os.close(its)
        self._listening.append(asyncio.create_task(self._read_status(ours)))
        if process.stderr is not None:
            self._listening.append(asyncio.create_task(self._read_log(process.stderr)))
        return self

    async def __aexit__(self, *_: object) -> None:
        self.signal(signal.SIGKILL)  # has an effect only if the caller was cancelled or failed
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(1.0):  # a grandchild may hold the other end
                await asyncio.gather(*self._listening, return_exceptions=True)
        for task in self._listening:
            task.cancel()

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def code(self) -> int | None:
        """The exit code, or minus the signal that killed the process; None while it is alive."""
        return self._process.returncode

    def signal(self, number: int) -> None:
        if self.code is None:
            with contextlib.suppress(ProcessLookupError):
                self._process.send_signal(number)

    async def wait(self, timeout: float) -> int | None:
        """The exit code, or None if the process is still alive after `timeout` seconds."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout):
                await self._process.wait()
        return self.code

    async def _read_status(self, pipe: int) -> None:
        reader = asyncio.StreamReader()
        transport, _ = await asyncio.get_running_loop().connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(pipe, "rb")
        )
        try:
            while text := await reader.readline():
                self._on_status(text)
        finally:
            transport.close()

    async def _read_log(self, stderr: asyncio.StreamReader) -> None:
        assert self._on_log is not None
        while text := await stderr.readline():
            self._on_log(text.decode(errors="replace").rstrip("\n"))


class ProcessSupervisor(Supervisor):
    """A supervisor of processes on this machine; it passes signals on."""

    def __init__(
        self,
        command: Sequence[str],
        workers: int,
        *,
        grace: float,
        until_idle: bool,
        on_log: Callable[[str], None] | None,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(workers, grace=grace, until_idle=until_idle)
        self._command = command
        self._on_log = on_log
        self._environment = environment
        self._processes: dict[WorkerSlot, WorkerProcess] = {}

    @property
    def pids(self) -> list[int]:
        return [process.pid for process in self._processes.values()]

    def _send_stop(self, slot: WorkerSlot) -> None:
        if slot in self._processes:
            self._processes[slot].signal(signal.SIGTERM if self._stops < 3 else signal.SIGKILL)

    async def _run_worker(self, slot: WorkerSlot) -> int:
        try:
            process = WorkerProcess(
                self._command,
                slot.number,
                on_status=slot.receive_status,
                on_log=self._on_log,
                environment=self._environment,
            )
            async with process:
                self._processes[slot], slot.occupied = process, True
                log.info("worker %d started, process %d", slot.number, process.pid)
                if self._stopping.is_set():
                    process.signal(signal.SIGTERM)
                while (code := await process.wait(0.5)) is None:
                    if self._must_kill:
                        log.error("worker %d does not end and is killed", slot.number)
                        process.signal(signal.SIGKILL)
                return code
        finally:
            self._processes.pop(slot, None)
            slot.clear()
