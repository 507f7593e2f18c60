"""A long-running task: it supervises one worker process on its executor while the driver is reachable.

The task has a connection to the driver. The driver sends run, stop, and a beat every second; the task sends the status
of its worker. When the connection ends, the worker stops in order. It also stops when the task itself is killed,
because its standard input then ends.

The worker is a separate process because a handler may crash or hang. Spark gives up a task after a few failures, and
with it the application.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import sys
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import msgspec

from millpond.clock import monotonic
from millpond.spark.handlers.certificate import NAME, task_context
from millpond.worker.processes import WorkerProcess, own_command
from millpond.worker.supervisor import KILL_AFTER

RUN, STOP, BEAT = b"run\n", b"stop\n", b"\n"
EVERY = 1.0
"""Seconds between two beats, in both directions."""
SILENT = 30.0
"""Seconds without a beat after which the other side counts as gone."""


class TaskOrder(NamedTuple):
    """Sent by the driver with the task."""

    slot: int
    host: str
    port: int
    token: str
    arguments: tuple[str, ...]
    """Arguments of the command `millpond`."""
    path: tuple[str, ...]
    """The driver's `sys.path`, if the executor is on its machine."""
    grace: float
    certificate: str = ""
    """The certificate of the driver, if the connection is encrypted."""


class Hello(msgspec.Struct):
    """The first line from a task to its driver."""

    token: str
    slot: int
    host: str


class Ended(NamedTuple):
    """Result of a task."""

    code: int
    """Exit code."""
    last_output: str
    """Host and last output of the worker."""


def keep_worker(order: TaskOrder, rows: Iterable[int]) -> Iterator[Ended]:
    """The function of the Spark job."""
    for _ in rows:
        pass
    yield asyncio.run(_Task(order).run())


class _Task:
    def __init__(self, order: TaskOrder) -> None:
        self._order = order
        self._kill_at: float | None = None
        self._last_output = ""

    async def run(self) -> Ended:
        order, host = self._order, socket.gethostname()
        try:
            async with asyncio.timeout(SILENT):
                reader, writer = await _connect(order)
        except (OSError, TimeoutError) as e:
            return Ended(1, f"{host} cannot reach the driver at {order.host}:{order.port}: {e or 'no answer'}")
        try:
            writer.write(msgspec.json.encode(Hello(order.token, order.slot, host)) + b"\n")
            if await _read_command(reader) != RUN:
                return Ended(0, "")
            code = await self._work(reader, writer)
        finally:
            writer.close()
            with contextlib.suppress(OSError, TimeoutError):
                # TLS ends with an answer of the driver; the event loop ends with this call.
                await asyncio.wait_for(writer.wait_closed(), EVERY)
        return Ended(code, f"{host}: {self._last_output}" if code > 0 and self._last_output else host)

    async def _work(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> int:
        order = self._order
        path = dict.fromkeys(entry for entry in (*order.path, *sys.path) if entry)
        process = WorkerProcess(
            own_command(order.arguments),
            order.slot,
            on_status=lambda line: _write(writer, line),
            on_log=self._log_line,
            # Files that were shipped with the application are only on this process's path.
            environment={**os.environ, "PYTHONPATH": os.pathsep.join(path)},
        )
        async with process:
            commands = asyncio.create_task(self._apply_commands(reader, process))
            try:
                while (code := await process.wait(EVERY)) is None:
                    _write(writer, BEAT)
                    if self._kill_at is not None and monotonic() >= self._kill_at:
                        process.signal(signal.SIGKILL)
                return code
            finally:
                commands.cancel()

    async def _apply_commands(self, reader: asyncio.StreamReader, process: WorkerProcess) -> None:
        """The first stop means finish, the second interrupt. A lost driver means finish."""
        while True:
            command = await _read_command(reader)
            process.signal(signal.SIGTERM)
            self._kill_at = monotonic() + self._order.grace + KILL_AFTER
            if not command:
                return

    def _log_line(self, line: str) -> None:
        """Write the worker's log to that of the executor."""
        if line.strip():
            self._last_output = line.strip()
        with contextlib.suppress(OSError):
            print(line, file=sys.stderr, flush=True)


async def _connect(order: TaskOrder) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    if not order.certificate:
        return await asyncio.open_connection(order.host, order.port)
    tls = task_context(order.certificate)
    return await asyncio.open_connection(order.host, order.port, ssl=tls, server_hostname=NAME)


async def _read_command(reader: asyncio.StreamReader) -> bytes:
    """The driver's next command, without beats; empty if the driver is gone."""
    with contextlib.suppress(OSError, TimeoutError):
        while True:
            async with asyncio.timeout(SILENT):
                line = await reader.readline()
            if line != BEAT:
                return line
    return b""


def _write(writer: asyncio.StreamWriter, line: bytes) -> None:
    if not writer.is_closing():
        writer.write(line)
