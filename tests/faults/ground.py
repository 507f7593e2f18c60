"""A database on which a scenario takes place, its messages, and what became of them."""

from __future__ import annotations

import asyncio
import contextlib
import random
import signal
import sqlite3
import zlib
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any, TypeVar, cast

import millpond
from millpond import Message, Store
from millpond.codec import CONTENT_TYPE, TEXT
from millpond.errors import StoreError
from servers import MariaDB, Postgres
from tests.faults.checker import Tally, check
from tests.faults.effects import TABLE, Effects
from tests.faults.plan import Plan
from tests.faults.processes import Process, Processes
from tests.faults.report import SEED, Line, report
from tests.waiting import SOON, until

T = TypeVar("T")

ALL = ("sqlite", "postgres", "mariadb")
SERVERS = ("postgres", "mariadb")

PATIENT = {"max_crashes": None, "retry": {"initial": 0.1, "maximum": 0.5, "attempts": 1000}}
"""Where a test kills at random, or takes the database away, no message shall be taken for poison."""

_SERVER = {
    "sqlite": {"synchronous": "PRAGMA synchronous"},
    "postgres": {
        "version": "SHOW server_version",
        "fsync": "SHOW fsync",
        "synchronous_commit": "SHOW synchronous_commit",
    },
    "mariadb": {
        "version": "SELECT version()",
        "innodb_flush_log_at_trx_commit": "SELECT @@innodb_flush_log_at_trx_commit",
    },
}


class Ground:
    """One database, with the tables of the store and the effects table."""

    def __init__(self, name: str, url: str, store: Store, folder: Path, server: Postgres | MariaDB | None) -> None:
        self.name = name
        self.url = url
        self._server = server
        self.store = store
        self.folder = folder
        self.effects = Effects(url)
        self.processes = Processes(folder)
        self.chance = random.Random(zlib.crc32(f"{SEED} {folder.name}".encode()))
        self.confirmed: set[str] = set()
        self.unknown: set[str] = set()
        """Publish failed, and nobody knows whether the messages are there."""
        self.exact: set[str] = set()

    @property
    def server(self) -> Postgres | MariaDB:
        assert self._server is not None, "SQLite has no server"
        return self._server

    def plan(self, *queues: str, folder: str = ".", options: dict[str, Any] | None = None, **more: Any) -> Plan:
        """A plan for a worker of these queues."""
        place = self.folder / folder
        place.mkdir(exist_ok=True)
        more = {"url": self.url, "effects_url": self.url, **more}
        return Plan(folder=str(place), queues={queue: options or {} for queue in queues}, **more)

    # --- publish ------------------------------------------------------------------------------------

    async def publish(self, queue: str, numbers: list[str], store: Store | None = None) -> None:
        """Publish, and remember whether it succeeded, failed, or nobody knows."""
        if queue == "exact":
            self.exact.update(numbers)
        try:
            await (store or self.store).publish([message(queue, number) for number in numbers])
        except StoreError:
            self.unknown.update(numbers)
        else:
            self.confirmed.update(numbers)

    async def produce(self, producer: str, count: int, *, batch: int = 50, store: Store | None = None) -> None:
        """`producer-n` for all n below the count, to `plain` and `exact` in turn."""
        for start in range(0, count, batch):
            numbers = [f"{producer}-{n}" for n in range(start, min(start + batch, count))]
            await self.publish(("plain", "exact")[start // batch % 2], numbers, store)

    # --- look ---------------------------------------------------------------------------------------

    async def rows(self, text: str) -> list[Any]:
        """A look past the store, and past any proxy, by a connection of its own."""

        return await self._look(lambda: self.effects.execute(text))

    async def _look(self, look: Callable[[], T]) -> T:
        def in_thread() -> T:
            try:
                return look()
            finally:
                self.effects.close()

        return await asyncio.to_thread(in_thread)

    async def one(self, text: str) -> Any:
        return (await self.rows(text))[0][0]

    async def live(self) -> int:
        return int(await self.one("SELECT count(*) FROM message"))

    async def drained(self, within: float = SOON) -> None:
        async def empty() -> bool:
            return await self.live() == 0

        await until(empty, f"{self.name}: the last message", within, every=0.1)

    async def steady(self, *processes: Process, within: float = SOON) -> None:
        """Wait until these workers have beaten for long enough to judge others."""
        pids = {str(process.pid) for process in processes}

        async def beating() -> bool:
            rows = await self.rows("SELECT name, beat_at - started_at FROM message_worker")
            return pids <= {name.rpartition(":")[2] for name, lived in rows if lived > 3_000_000}

        await until(beating, f"{self.name}: steady workers", within, every=0.05)

    async def stand_still(self, process: Process) -> None:
        """SIGSTOP, but not while it holds the one lock of a SQLite file: nobody could write until it wakes."""
        while True:
            process.signal(signal.SIGSTOP)
            if self.name != "sqlite":
                return
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(2):
                    await self.store.pause("nobody")
                return
            process.signal(signal.SIGCONT)

    # --- judge --------------------------------------------------------------------------------------

    async def tally(self) -> Tally:
        """After the drain."""
        runs = await self._look(self.effects.runs)
        return check(self.confirmed, self.unknown, runs, exact=self.exact, dead=await self.dead())

    async def dead(self) -> set[str]:
        rows = await self.rows("SELECT payload FROM message_archive WHERE state = 'FAILED'")
        return {bytes(payload).decode() for (payload,) in rows}

    async def processing(self) -> int:
        return int(await self.one("SELECT count(*) FROM message WHERE state = 'PROCESSING'"))

    async def judge(self, scenario: str, faults: int, **more: Any) -> Tally:
        """Report, and hold to it: nothing lost, every doubled delivery told, nothing left."""
        tally = await self.tally()
        await self.report(scenario, tally, faults, **more)
        assert tally.faultless, (self.name, tally)
        assert await self.live() == 0
        completed = await self.one("SELECT count(*) FROM message_archive WHERE state = 'COMPLETED'")
        assert completed == tally.messages - len(tally.dead)
        return tally

    async def report(self, scenario: str, tally: Tally, faults: int, **more: Any) -> None:
        line = Line(
            scenario,
            self.name,
            tally.messages,
            faults,
            len(tally.lost),
            tally.doubled,
            len(tally.unflagged),
            tally.recovered,
            {"effects_wrong": len(tally.wrong), "dead": len(tally.dead), **more},
        )
        server = {name: str(await self.one(text)) for name, text in _SERVER[self.name].items()}
        if self.name == "sqlite":
            server["version"] = sqlite3.sqlite_version
        report(line, server)


def message(queue: str, number: str) -> Message:
    return Message(queue=queue, payload=number.encode(), headers={CONTENT_TYPE: TEXT})


@contextlib.asynccontextmanager
async def ground(name: str, url: str, folder: Path, server: Postgres | MariaDB | None = None) -> AsyncIterator[Ground]:
    """Prepare a database; end every process that was started on it."""
    folder.mkdir(parents=True)
    store = cast(Store, await millpond.connect(url, migrate=True))
    here = Ground(name, url, store, folder, server)
    try:
        await here.rows(TABLE)
        async with here.processes:
            yield here
    finally:
        await store.close()
