"""The database of a scenario, its messages and their results."""

from __future__ import annotations

import asyncio
import contextlib
import random
import signal
import sqlite3
import zlib
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any, TypeVar

import millpond
from millpond import Message, Transport
from millpond.codec import CONTENT_TYPE, TEXT
from millpond.errors import StoreError
from servers import MariaDB, Postgres
from tests.faults.checker import Tally, check
from tests.faults.disk import SmallDisk
from tests.faults.effects import TABLE, Effects
from tests.faults.plan import Plan
from tests.faults.processes import Process, Processes
from tests.faults.report import SEED, Line, report
from tests.waiting import SOON, until

T = TypeVar("T")

ALL = ("sqlite", "postgres", "mariadb")
SERVERS = ("postgres", "mariadb")

PATIENT = {"max_crashes": None, "retry": {"initial": 0.1, "maximum": 0.5, "attempts": 1000}}
"""For tests that kill at random or stop the database: no message must count as poison."""

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


class Setup:
    """One database, with the tables of the store and the effects table."""

    def __init__(
        self,
        name: str,
        url: str,
        store: Transport,
        folder: Path,
        server: Postgres | MariaDB | None,
        *,
        disk: SmallDisk | None = None,
        long: bool = False,
    ) -> None:
        self.name = name
        self.url = url
        self._server = server
        self._disk = disk
        self.long = long
        self.store = store
        self.folder = folder
        self.effects = Effects(url)
        self.processes = Processes(folder)
        self.chance = random.Random(zlib.crc32(f"{SEED} {folder.name}".encode()))
        self.confirmed: set[str] = set()
        self.unknown: set[str] = set()
        """Publish failed, and it is unknown whether the messages were stored."""
        self.exact: set[str] = set()
        self.poison: set[str] = set()
        """Messages that must become dead letters."""

    @property
    def server(self) -> Postgres | MariaDB:
        assert self._server is not None, "SQLite has no server"
        return self._server

    @property
    def disk(self) -> SmallDisk:
        assert self._disk is not None, "this scenario has no small disk"
        return self._disk

    def plan(self, *queues: str, folder: str = ".", options: dict[str, Any] | None = None, **more: Any) -> Plan:
        """A plan for a worker of these queues."""
        place = self.folder / folder
        place.mkdir(exist_ok=True)
        more = {"url": self.url, "effects_url": self.url, **more}
        return Plan(folder=str(place), queues={queue: options or {} for queue in queues}, **more)

    # --- publish ------------------------------------------------------------------------------------

    async def publish(self, queue: str, numbers: list[str], store: Transport | None = None) -> None:
        """Publish, and remember the result: succeeded, failed or unknown."""
        if queue == "exact":
            self.exact.update(numbers)
        try:
            await (store or self.store).publish([message(queue, number) for number in numbers])
        except (StoreError, asyncio.CancelledError) as e:
            self.unknown.update(numbers)
            if isinstance(e, asyncio.CancelledError):
                raise
        else:
            self.confirmed.update(numbers)

    async def produce(self, producer: str, count: int, *, batch: int = 50, store: Transport | None = None) -> None:
        """`producer-n` for all n below the count, to `plain` and `exact` in turn."""
        for start in range(0, count, batch):
            numbers = [f"{producer}-{n}" for n in range(start, min(start + batch, count))]
            await self.publish(("plain", "exact")[start // batch % 2], numbers, store)

    # --- read ---------------------------------------------------------------------------------------

    async def rows(self, text: str) -> list[Any]:
        """A query by a direct connection, without the store and without a proxy."""

        return await self._query(lambda: self.effects.execute(text))

    async def _query(self, query: Callable[[], T]) -> T:
        def in_thread() -> T:
            try:
                return query()
            finally:
                self.effects.close()

        return await asyncio.to_thread(in_thread)

    async def one(self, text: str) -> Any:
        return (await self.rows(text))[0][0]

    async def live(self) -> int:
        return int(await self.one("SELECT count(*) FROM millpond_message"))

    async def drained(self, within: float = SOON) -> None:
        async def empty() -> bool:
            return await self.live() == 0

        await until(empty, f"{self.name}: the last message", within, every=0.1)

    async def drained_of(self, queue: str) -> None:
        async def empty() -> bool:
            return bool(await self.one(f"SELECT count(*) FROM millpond_message WHERE queue = '{queue}'") == 0)

        await until(empty, f"{self.name}: the last message of {queue}", every=0.1)

    async def steady(self, *processes: Process, within: float = SOON) -> None:
        """Wait until these workers have beaten long enough to judge other workers."""
        pids = {str(process.pid) for process in processes}

        async def beating() -> bool:
            rows = await self.rows("SELECT name, beat_at - started_at FROM millpond_worker")
            return pids <= {name.rpartition(":")[2] for name, lived in rows if lived > 3_000_000}

        await until(beating, f"{self.name}: steady workers", within, every=0.05)

    async def stand_still(self, process: Process) -> None:
        """SIGSTOP, but not while the process holds the write lock of a SQLite file: no other process could write."""
        while True:
            process.signal(signal.SIGSTOP)
            if self.name != "sqlite":
                return
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(2):
                    await self.store.operations.pause("unused")
                return
            process.signal(signal.SIGCONT)

    # --- judge --------------------------------------------------------------------------------------

    async def tally(self) -> Tally:
        """After the drain."""
        runs = await self._query(self.effects.runs)
        return check(self.confirmed, self.unknown, runs, exact=self.exact, dead=await self.dead(), poison=self.poison)

    async def are_running(self, *numbers: str) -> None:
        """Wait until the handlers of these messages have written their effects."""

        async def all_run() -> bool:
            return set(numbers) <= {number for (number,) in await self.rows("SELECT number FROM effects")}

        await until(all_run, f"{self.name}: running handlers", every=0.1)

    async def dead(self) -> set[str]:
        rows = await self.rows("SELECT payload FROM millpond_archive WHERE state = 'FAILED'")
        return {bytes(payload).decode() for (payload,) in rows}

    async def reasons(self, numbers: set[str]) -> list[tuple[str, str, str]]:
        """Why these messages failed, for the text of an assertion."""
        rows = await self.rows("SELECT payload, reason, error FROM millpond_archive WHERE state = 'FAILED'")
        found = [(bytes(payload).decode(), reason, error) for payload, reason, error in rows]
        return [failed for failed in found if failed[0] in numbers]

    async def processing(self) -> int:
        return int(await self.one("SELECT count(*) FROM millpond_message WHERE state = 'PROCESSING'"))

    async def judge(self, scenario: str, faults: int, *, rate: float | None = None, **more: Any) -> Tally:
        """Report and assert: nothing lost, every repeated delivery flagged, nothing left, only poison dead."""
        tally = await self.tally()
        await self.report(scenario, tally, faults, rate=rate, **more)
        assert tally.faultless, (self.name, tally, await self.reasons(tally.innocents))
        assert tally.dead == self.poison
        assert await self.live() == 0
        completed = await self.one("SELECT count(*) FROM millpond_archive WHERE state = 'COMPLETED'")
        assert completed == tally.messages - len(tally.dead)
        return tally

    async def report(self, scenario: str, tally: Tally, faults: int, *, rate: float | None = None, **more: Any) -> None:
        line = Line(
            scenario,
            self.name,
            tally.messages,
            faults,
            len(tally.lost),
            tally.doubled,
            len(tally.unflagged),
            tally.recovered,
            len(tally.innocents),
            rate,
            {"effects_wrong": len(tally.wrong), "dead": len(tally.dead), **more},
        )
        await self.report_line(line)

    async def report_line(self, line: Line) -> None:
        """Report a result with the settings of the database."""
        server = {name: str(await self.one(text)) for name, text in _SERVER[self.name].items()}
        if self.name == "sqlite":
            server["version"] = sqlite3.sqlite_version
        report(line, server)


def message(queue: str, number: str) -> Message:
    return Message(queue=queue, payload=number.encode(), headers={CONTENT_TYPE: TEXT})


@contextlib.asynccontextmanager
async def set_up(
    name: str, url: str, folder: Path, server: Postgres | MariaDB | None = None, **more: Any
) -> AsyncIterator[Setup]:
    """Prepare a database; at the end, stop every process that was started on it."""
    folder.mkdir(parents=True, exist_ok=True)
    store = await millpond.connect(url, migrate=True)
    here = Setup(name, url, store, folder, server, **more)
    try:
        await here.rows(TABLE)
        async with here.processes:
            yield here
    finally:
        await store.close()
