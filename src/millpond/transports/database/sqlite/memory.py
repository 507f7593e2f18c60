"""`memory://`: SQLite without a file, for tests and small programs. Its messages end with the process.

`memory://` is private to its caller. All handles on `memory://name` share one database, which ends with the last one.
"""

from __future__ import annotations

import functools
import os
import sqlite3
import threading
from collections.abc import Callable
from functools import cached_property
from typing import Any, NoReturn, TypeVar
from weakref import WeakValueDictionary

from millpond.checks import known_options
from millpond.errors import InvalidOption, Unsupported, not_supported
from millpond.seam.transport import Capability, missing, refused
from millpond.transports.database.bulk import DatabaseBulk
from millpond.transports.database.messages.hints import Hints
from millpond.transports.database.migration.migrate import ddl
from millpond.transports.database.operations.operations import DatabaseOperations
from millpond.transports.database.options import StoreOptions, parse
from millpond.transports.database.runner import Mode
from millpond.transports.database.sql.statement import Steps, drive
from millpond.transports.database.sqlite.dialect import SqliteDialect
from millpond.transports.database.sqlite.engine import executor, in_transaction
from millpond.transports.database.store import CAPABILITIES, DatabaseStore
from millpond.transports.database.workers.workers import DatabaseWorkers
from millpond.transports.url import Url, check_parameters

T = TypeVar("T")

_DIALECT = SqliteDialect()
_LACKING = (
    Capability.TRANSACTIONS
    | Capability.PRESENCE
    | Capability.STREAMS
    | Capability.STREAM_STATUS
    | Capability.BULK
    | Capability.EXPORTS
    | Capability.SHARED
    | Capability.DURABLE
)


class MemoryEngine:
    """One connection, shared by all handles on a name.

    Statements run in the thread of the caller's event loop: they wait for no disk and no other process, and a
    separate thread would add two switches to every call. The lock is for handles in event loops of other threads.
    """

    dialect = _DIALECT

    def __init__(self, name: str, options: StoreOptions) -> None:
        self.options = options
        self.hints = Hints(_DIALECT)
        self.handles = 0
        self._name = name
        self._connection = _connect()
        _template().backup(self._connection)
        self._lock = threading.Lock()
        self._process = os.getpid()

    async def run(self, steps: Callable[[], Steps[T]], mode: Mode = Mode.WRITE) -> T:
        if self._process != os.getpid():
            raise Unsupported(
                f"memory:// exists in process {self._process} only, and this is process {os.getpid()} (it lacks the "
                "capability SHARED); connect here, or give the URL of a database"
            )
        with self._lock:
            if mode is Mode.READ:
                return drive(steps(), executor(self._connection))
            self._connection.execute("BEGIN")
            return in_transaction(self._connection, steps)

    async def hold(self, worker: int) -> NoReturn:
        raise not_supported("join", Capability.PRESENCE)

    async def listen(self, channel: str, on_queue: Callable[[str | None], None]) -> None:
        """Return at once: handles on one name share their hints."""

    async def discard(self, worker: int) -> None:
        """No worker has a lock here."""

    async def close(self) -> None:
        with _naming:
            self.handles -= 1
            if self.handles:
                return
            _named.pop(self._name, None)
        self._connection.close()


class MemoryWorkers(DatabaseWorkers):
    join = refused("join", Capability.PRESENCE)

    def hold(self, lease: int) -> NoReturn:
        raise not_supported("claim(by_worker=True)", Capability.PRESENCE)


class MemoryStore(DatabaseStore):
    """One handle on a database in memory."""

    capabilities = CAPABILITIES & ~_LACKING
    streams = missing("a stream", Capability.STREAMS | Capability.STREAM_STATUS)
    bulk = missing("a bulk publish", Capability.BULK)
    exports = missing("an export", Capability.EXPORTS)
    transactions = missing(
        "your own transaction", Capability.TRANSACTIONS, "in a test give pond.testing the URL of an empty database"
    )

    def __init__(self, engine: MemoryEngine, url: Url) -> None:
        super().__init__(engine, engine.options, url)
        self.hints = engine.hints

    def __repr__(self) -> str:
        return f"<MemoryStore {self.url}>"

    @cached_property
    def operations(self) -> DatabaseOperations:
        return DatabaseOperations(self.runner, self.hints, DatabaseBulk(self.runner))

    @cached_property
    def workers(self) -> MemoryWorkers:
        return MemoryWorkers(self.runner, self.hints)


_named: WeakValueDictionary[str, MemoryEngine] = WeakValueDictionary()
"""Databases by name; one ends when its last handle is closed or forgotten."""
_naming = threading.Lock()
"""Held while a database is found or made and its handles are counted: event loops of several threads connect."""


def check_options(given: dict[str, Any]) -> StoreOptions:
    known_options(given, ("body_limit", "clock", "dedupe_for"))
    return parse(given)


def check_address(url: Url) -> None:
    check_parameters(url, ())


async def connect(url: Url, **given: Any) -> MemoryStore:
    options = check_options(given)
    check_address(url)
    name = f"{url.host or ''}{url.path}".strip("/")
    with _naming:
        engine = _named.get(name) if name else None
        if engine is None:
            engine = MemoryEngine(name, options)
            if name:
                _named[name] = engine
        elif given and options != engine.options:
            raise InvalidOption(f"memory://{name} is open with other options; give the same, or none")
        engine.handles += 1
    return MemoryStore(engine, url)


@functools.cache
def _template() -> sqlite3.Connection:
    """An empty database with our tables. A copy takes a fortieth of the time of creating them."""
    connection = _connect()
    connection.executescript(ddl(_DIALECT))
    return connection


def _connect() -> sqlite3.Connection:
    return sqlite3.connect(":memory:", isolation_level=None, cached_statements=256, check_same_thread=False)
