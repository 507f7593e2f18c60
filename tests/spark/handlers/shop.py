"""An application whose subscribers run on Spark: a module in its own folder, and the records of its handlers."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any
from uuid import uuid4

from millpond import Millpond, State
from tests.waiting import until

APP = """
import asyncio
import os
from pathlib import Path

from millpond import Delivery, Millpond, NackMessage, RejectMessage

FOLDER = Path({folder!r})
pond = Millpond({url!r}, **{options!r})


def note(*words):
    with open(FOLDER / "notes", "a") as file:
        file.write(" ".join(map(str, words)) + "\\n")


@pond.on_start
def started():
    note("started", os.getpid(), os.getppid())


@pond.subscriber("orders", max_workers=4)
async def ship(n: int, delivery: Delivery):
    note("order", n, delivery.claim.deliveries, os.getpid())
    if n % 10 == 3:
        raise RejectMessage("sold out")
    if n % 10 == 4 and not delivery.redelivered:
        raise NackMessage(delay=0)


@pond.subscriber("held", max_workers=1, fetch=3)
async def hold(n: int, delivery: Delivery):
    note("held", n, delivery.claim.deliveries, os.getpid())
    while not (FOLDER / "the word").exists():
        await asyncio.sleep(0.02)


@pond.subscriber("deadly", lease=2)
async def die(n: int, delivery: Delivery):
    note("deadly", n, delivery.claim.deliveries, os.getpid())
    if not delivery.redelivered:
        os._exit(9)
"""


class Shop:
    def __init__(self, folder: Path, url: str, **options: Any) -> None:
        self.folder = folder
        self.url = url
        self.name = f"shop_{uuid4().hex[:8]}"
        options = options or {"migrate": True}
        values = {"{url!r}": url, "{folder!r}": str(folder), "{options!r}": options}
        self.code = APP
        for place, value in values.items():
            self.code = self.code.replace(place, repr(value))
        self.pond = Millpond(url, **options)
        """A pond for publishing and reading; the workers have another one."""
        self._processes: list[subprocess.Popen[bytes]] = []

    def module(self, folder: Path, more: str = "") -> str:
        """Write the application's module; returns its name."""
        (folder / f"{self.name}.py").write_text(self.code + more)
        return self.name

    def imported(self) -> ModuleType:
        """The module imported in this process, as in a driver."""
        import importlib

        self.module(self.folder)
        importlib.invalidate_caches()
        return importlib.import_module(self.name)

    def notes(self, kind: str) -> list[list[str]]:
        """Records of the handlers, without an incomplete last line."""
        path = self.folder / "notes"
        lines = path.read_text().splitlines(keepends=True) if path.exists() else []
        return [line.split()[1:] for line in lines if line.endswith("\n") and line.split()[0] == kind]

    def workers(self) -> list[int]:
        return [int(note[0]) for note in self.notes("started")]

    def give_the_word(self) -> None:
        (self.folder / "the word").touch()

    async def counts(self, queue: str) -> dict[State, int]:
        (stats,) = await (await self.pond.transport).operations.count([queue])
        return {state: number for state, number in stats.counts.items() if number}

    async def drained(self, queue: str) -> dict[State, int]:
        live = {State.PENDING, State.PROCESSING, State.RETRYABLE}

        async def look() -> list[dict[State, int]]:
            now = await self.counts(queue)
            return [] if set(now) & live else [now]

        return dict((await until(look))[0])

    def start(self, *arguments: str, cwd: Path) -> subprocess.Popen[bytes]:
        """`millpond run` in a separate process."""
        with (self.folder / "stderr").open("ab") as stderr:
            process = subprocess.Popen(
                [sys.executable, "-m", "millpond", "run", *arguments],
                cwd=cwd,
                stdin=subprocess.DEVNULL,
                stdout=stderr,
                stderr=stderr,
                env={**os.environ, "COLUMNS": "200"},
            )
        self._processes.append(process)
        return process

    @property
    def stderr(self) -> str:
        return (self.folder / "stderr").read_text(errors="replace")

    async def close(self) -> None:
        await self.pond.close()
        for process in self._processes:
            if process.poll() is None:
                process.kill()
                process.wait()
        for pid in self.workers():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
