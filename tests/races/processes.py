"""Real processes for the races: each plays one role, sends results as lines of JSON, and can be killed."""

from __future__ import annotations

import asyncio
import json
import signal
import sys
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from tests.waiting import SOON

ROOT = Path(__file__).resolve().parents[2]


class Actor:
    """One process in one role (see roles.py); both sides send lines."""

    def __init__(self, role: str, process: asyncio.subprocess.Process) -> None:
        self.role = role
        self._process = process

    @classmethod
    async def start(cls, role: str, **args: Any) -> Self:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "tests.races.roles", role, json.dumps(args)),
            cwd=ROOT,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            limit=1 << 26,
        )
        return cls(role, process)

    @property
    def pid(self) -> int:
        return self._process.pid

    async def receive(self, within: float = SOON) -> dict[str, Any]:
        """The next line from the process."""
        assert self._process.stdout is not None
        line = await asyncio.wait_for(self._process.stdout.readline(), within)
        if not line:
            raise AssertionError(f"{self.role} ended with {await self._process.wait()} without a further line")
        return json.loads(line)  # type: ignore[no-any-return]

    def send(self, word: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(word.encode() + b"\n")

    async def ends(self, within: float = SOON) -> None:
        assert await asyncio.wait_for(self._process.wait(), within) == 0, f"{self.role} failed"

    def signal(self, number: signal.Signals) -> None:
        self._process.send_signal(number)

    async def kill(self) -> None:
        if self._process.returncode is None:
            self._process.kill()
            await self._process.wait()


class Actors:
    """All processes of a test; none outlives it."""

    def __init__(self) -> None:
        self._all: list[Actor] = []

    async def start(self, role: str, **args: Any) -> Actor:
        actor = await Actor.start(role, **args)
        self._all.append(actor)
        return actor

    async def start_many(self, count: int, role: str, **args: Any) -> list[Actor]:
        """A number of processes, all connected and waiting for a line."""
        actors = [await self.start(role, number=n, **args) for n in range(count)]
        for actor in actors:
            assert (await actor.receive()) == {"ready": True}
        return actors

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, _: type[BaseException] | None, __: BaseException | None, ___: TracebackType | None
    ) -> None:
        for actor in self._all:
            await actor.kill()


def report(
    test: str, url: str, *, messages: int, faults: int = 0, lost: int = 0, doubled: int = 0, **recovered: Any
) -> None:
    """Print one line for people."""
    more = " ".join(f"{name}={value}" for name, value in recovered.items()) or "-"
    print(
        f"\n{test:<28} {url.partition(':')[0]:<11} messages={messages} faults={faults} lost={lost} "
        f"doubled={doubled} recovered: {more}"
    )
