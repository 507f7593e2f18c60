"""An application that `millpond run` runs, in its own folder."""

import contextlib
import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

from tests.triggers import execute
from tests.waiting import until


class Shop:
    """An application in a folder, its worker processes, and the notes of its handlers."""

    def __init__(self, folder: Path, url: str, code: str) -> None:
        self.folder = folder
        self.url = url
        self.write("shop", code)
        self._processes: list[subprocess.Popen[bytes]] = []

    def write(self, module: str, code: str) -> None:
        (self.folder / f"{module}.py").write_text(textwrap.dedent(code).replace("{url!r}", repr(self.url)))

    def start(self, *arguments: str) -> subprocess.Popen[bytes]:
        stderr = (self.folder / "stderr").open("ab")
        with stderr:
            process = subprocess.Popen(
                [sys.executable, "-m", "millpond", "run", *arguments],
                cwd=self.folder,
                stderr=stderr,
                stdin=subprocess.DEVNULL,
                env={**os.environ, "COLUMNS": "200"},
            )
        self._processes.append(process)
        return process

    @property
    def stderr(self) -> str:
        path = self.folder / "stderr"
        return path.read_text() if path.exists() else ""

    @property
    def notes(self) -> list[list[str]]:
        path = self.folder / "notes"
        return [line.split() for line in path.read_text().splitlines()] if path.exists() else []

    def orders(self) -> list[str]:
        return [note[1] for note in self.notes if note[0] == "order"]

    def workers(self) -> list[int]:
        return [int(note[1]) for note in self.notes if note[0] == "started"]

    def close(self) -> None:
        print(self.notes, self.stderr, sep="\n")  # pytest shows it if the test has failed
        for process in self._processes:
            if process.poll() is None:
                process.kill()
                process.wait()
        for pid in self.workers():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


async def observing(url: str, workers: int) -> None:
    """Wait until these workers have observed each other for some seconds: then they judge a silent one soon."""

    def beats() -> dict[int, int]:
        return dict(execute(url, "SELECT id, beats FROM millpond_worker"))

    first = await until(lambda: found if len(found := beats()) == workers else None)
    await until(lambda: all(number >= first[worker] + 8 for worker, number in beats().items()), every=0.1)
