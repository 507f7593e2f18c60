"""What a long-running task does: it keeps one worker process on its executor, for as long as the driver is there.

The task holds a connection to the driver. On it the driver says run, stop, and every second that it is there; the
task tells how its worker gets on. Without the driver there is no work: when the connection ends, the worker stops
in good order. It stops as well when the task itself is killed, since its standard input then ends.

The worker is a process of its own so that neither a handler that crashes nor one that hangs takes the task with it:
Spark gives a task up after a few failures, and with it the application.
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
from millpond.worker.crew import KILL_AFTER
from millpond.worker.process import WorkerProcess, own_command

RUN, STOP, BEAT = b"run\n", b"stop\n", b"\n"
EVERY = 1.0
"""Seconds between two beats, both ways."""
SILENT = 30.0
"""Seconds without any after which the other one is taken for gone."""


class Order(NamedTuple):
    """What the driver sends along with a task."""

    place: int
    host: str
    port: int
    token: str
    arguments: tuple[str, ...]
    """Those of the command `millpond`."""
    path: tuple[str, ...]
    """Where the driver finds modules, if the executor is on its machine."""
    grace: float


class Hello(msgspec.Struct):
    """The first line from a task to its driver."""

    token: str
    place: int
    host: str


class Ended(NamedTuple):
    """What comes back as the result of a task."""

    code: int
    """As that of a process."""
    words: str
    """The last that was said, and where."""


def keep_worker(order: Order, rows: Iterable[int]) -> Iterator[Ended]:
    """The function of the Spark job."""
    for _ in rows:
        pass
    yield asyncio.run(_Task(order).run())


class _Task:
    def __init__(self, order: Order) -> None:
        self._order = order
        self._kill_at: float | None = None
        self._words = ""

    async def run(self) -> Ended:
        order, host = self._order, socket.gethostname()
        try:
            async with asyncio.timeout(SILENT):
                reader, writer = await asyncio.open_connection(order.host, order.port)
        except (OSError, TimeoutError) as e:
            return Ended(1, f"{host} cannot reach the driver at {order.host}:{order.port}: {e or 'no answer'}")
        try:
            writer.write(msgspec.json.encode(Hello(order.token, order.place, host)) + b"\n")
            if await _next_word(reader) != RUN:
                return Ended(0, "")
            code = await self._work(reader, writer)
        finally:
            writer.close()
        return Ended(code, f"{host}: {self._words}" if code > 0 and self._words else host)

    async def _work(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> int:
        order = self._order
        path = dict.fromkeys(entry for entry in (*order.path, *sys.path) if entry)
        process = WorkerProcess(
            own_command(order.arguments),
            order.place,
            hear=lambda line: _write(writer, line),
            say=self._say,
            # What was shipped with the application is on this process's path only.
            environment={**os.environ, "PYTHONPATH": os.pathsep.join(path)},
        )
        async with process:
            obeying = asyncio.create_task(self._obey(reader, process))
            try:
                while (code := await process.wait(EVERY)) is None:
                    _write(writer, BEAT)
                    if self._kill_at is not None and monotonic() >= self._kill_at:
                        process.signal(signal.SIGKILL)
                return code
            finally:
                obeying.cancel()

    async def _obey(self, reader: asyncio.StreamReader, process: WorkerProcess) -> None:
        """The first stop means finish, the second interrupt; a driver that is gone means finish."""
        while True:
            word = await _next_word(reader)
            process.signal(signal.SIGTERM)
            self._kill_at = monotonic() + self._order.grace + KILL_AFTER
            if not word:
                return

    def _say(self, line: str) -> None:
        """The worker's log is that of the executor."""
        if line.strip():
            self._words = line.strip()
        with contextlib.suppress(OSError):
            print(line, file=sys.stderr, flush=True)


async def _next_word(reader: asyncio.StreamReader) -> bytes:
    """What the driver says next, beside that it is there; nothing if it is gone."""
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
