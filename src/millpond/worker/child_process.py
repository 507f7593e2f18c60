"""A child process of a worker, in which suspects run one at a time, and the socket to it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
from collections.abc import Sequence
from typing import Self

from millpond.worker import child_messages
from millpond.worker.supervisor import describe_exit

_NICE = 10
"""The child's CPU priority: it imports the application, and must not slow down the handlers of the worker."""
_READ_WITHIN = 0.5
"""Seconds for the last messages of a process that has ended."""
_EXIT_WITHIN = 5.0
"""Seconds between the end of the socket and that of the process."""
_END_WITHIN = 10.0
"""Seconds for an idle child to call its `on_stop` functions and to end."""


class ChildProcess:
    """A running child. It ends when the socket is closed, and so when the worker dies."""

    def __init__(
        self, process: asyncio.subprocess.Process, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        self._process = process
        self._reader = reader
        self._writer = writer
        self._ending = asyncio.create_task(self._close_after_end())
        self._killing: asyncio.TimerHandle | None = None
        self._hung = False
        self.used = False
        """A message has run in it."""
        self.started = False
        """It has begun to run the message that was sent last."""
        self.idle_since = 0.0

    @classmethod
    async def start(cls, command: Sequence[str]) -> Self:
        """Start a process. The number of its socket is added to the command."""
        ours, its = socket.socketpair()
        with its:
            reader, writer = await asyncio.open_unix_connection(sock=ours)
            try:
                process = await asyncio.create_subprocess_exec(
                    *command,
                    str(its.fileno()),
                    stdin=asyncio.subprocess.DEVNULL,
                    pass_fds=[its.fileno()],
                    start_new_session=True,  # Ctrl-C reaches it through the worker only
                )
            except BaseException:
                await _close(writer)
                raise
        with contextlib.suppress(OSError):  # it has ended already, or has a lower priority
            os.setpriority(os.PRIO_PROCESS, process.pid, _NICE)
        return cls(process, reader, writer)

    @property
    def alive(self) -> bool:
        return self._process.returncode is None

    def send(self, message: child_messages.ToChild) -> None:
        if not self._writer.is_closing():
            self._writer.write(child_messages.pack(message))

    async def receive(self) -> child_messages.ToWorker | None:
        """The next message of the child; None if its process has ended."""
        return await child_messages.receive(self._reader)

    def kill(self) -> None:
        if self.alive:
            with contextlib.suppress(ProcessLookupError):
                # Not the method of the process: it would reap a dead one, and asyncio would not find its exit code.
                os.kill(self._process.pid, signal.SIGKILL)

    def kill_after(self, seconds: float | None) -> None:
        """Kill it after this time, and at no other time; None: not at all."""
        if self._killing is not None:
            self._killing.cancel()
        self._killing = None if seconds is None else asyncio.get_running_loop().call_later(seconds, self._kill_hung)

    def _kill_hung(self) -> None:
        self._hung = True
        self.kill()

    async def end(self) -> None:
        """Let an idle child end; kill it if it does not."""
        self.kill_after(_END_WITHIN)
        try:
            await self.close()
            await self._process.wait()
        finally:
            self.kill()

    async def close(self) -> None:
        """Close the socket: the child ends, at once if a handler runs."""
        await _close(self._writer)

    async def how_it_ended(self) -> str:
        """Wait for its end, and describe it."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_EXIT_WITHIN):
                await self._process.wait()
        self.kill()  # it has closed its socket and lives on
        code = await self._process.wait()
        return "killed because it hung" if self._hung else describe_exit(code)

    async def _close_after_end(self) -> None:
        """Close the socket: a process that a handler started may hold the other end open."""
        await self._process.wait()
        self.kill_after(None)
        await asyncio.sleep(_READ_WITHIN)
        await self.close()


async def _close(writer: asyncio.StreamWriter) -> None:
    writer.close()
    with contextlib.suppress(ConnectionError):  # the other end was closed first
        await writer.wait_closed()
