"""A worker in a process of its own, below somebody who watches it: `millpond run --supervised`.

It has a session of its own, so that Ctrl-C reaches it through the watcher only. It reads its standard input, which
ends when the watcher dies, and then stops too; it tells its status, a line of JSON at a time, through a pipe.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Self


def own_command(arguments: Sequence[str]) -> list[str]:
    """The command line that starts this very program again."""
    return [sys.executable, "-m", "millpond", *arguments]


class WorkerProcess:
    """As long as this context lasts; whatever still lives at its end is killed."""

    def __init__(
        self,
        command: Sequence[str],
        number: int,
        *,
        hear: Callable[[bytes], None],
        say: Callable[[str], None] | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self._command = command
        self._number = number
        self._hear = hear
        """Given each line of its status."""
        self._say = say
        """Given each line of its log; None: that goes to our own standard error."""
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
                stderr=None if self._say is None else asyncio.subprocess.PIPE,
                pass_fds=[its],
                start_new_session=True,
                env=self._environment,
            )
        except BaseException:
            os.close(ours)
            raise
        finally:
            os.close(its)
        self._listening.append(asyncio.create_task(self._listen(ours)))
        if process.stderr is not None:
            self._listening.append(asyncio.create_task(self._pass_on(process.stderr)))
        return self

    async def __aexit__(self, *_: object) -> None:
        self.signal(signal.SIGKILL)  # only if we are torn down ourselves
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
        """How it ended: minus the signal that killed it; None while it lives."""
        return self._process.returncode

    def signal(self, number: int) -> None:
        if self.code is None:
            with contextlib.suppress(ProcessLookupError):
                self._process.send_signal(number)

    async def wait(self, timeout: float) -> int | None:
        """Its code, or None when the time is over before it ends."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout):
                await self._process.wait()
        return self.code

    async def _listen(self, pipe: int) -> None:
        reader = asyncio.StreamReader()
        transport, _ = await asyncio.get_running_loop().connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(pipe, "rb")
        )
        try:
            while text := await reader.readline():
                self._hear(text)
        finally:
            transport.close()

    async def _pass_on(self, stderr: asyncio.StreamReader) -> None:
        assert self._say is not None
        while text := await stderr.readline():
            self._say(text.decode(errors="replace").rstrip("\n"))
