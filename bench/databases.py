"""The measured databases: private, crash-safe, with settings large enough not to limit the result.

Each creates fresh databases, fills them inside the server, and returns its version and settings.
"""

import shutil
import sqlite3
import tempfile
from collections.abc import AsyncIterator, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any, Protocol
from uuid import uuid4

import asyncpg

from bench.raw_mysql import RawMysql
from bench.raw_postgres import RawPostgres
from bench.raw_sqlite import RawSqlite
from bench.side import PAYLOAD, PRIORITY, QUEUE, Side
from servers import MariaDB, Postgres
from servers.processes import cpu_of

COLUMNS = "id, queue, priority, due_at, state, payload, created_at"
BASE = 1_700_000_000_000_000
"""A time long ago, in microseconds: filled messages are due, one microsecond after the other."""


class Database(Protocol):
    name: str
    notifies: bool
    """True if publishers notify waiting workers."""
    holds_itself_only: bool
    """True if a transaction held open in one database does not affect the others of the server."""

    def create(self) -> str:
        """Create an empty database; returns its URL."""

    def drop(self, url: str) -> None: ...

    async def raw(self, url: str, prefix: str) -> Side: ...

    async def fill(self, url: str, prefix: str, first: int, count: int) -> None:
        """Insert `count` waiting and due messages, numbered from `first`."""

    async def tidy(self, url: str) -> None:
        """Vacuum and write all pages, as a busy server eventually does by itself."""

    def hold(self, url: str) -> AbstractAsyncContextManager[None]:
        """Keep a transaction open whose snapshot sees all rows."""

    def cpu(self) -> float:
        """Seconds of processor time that the server has used so far."""

    def facts(self) -> Mapping[str, Any]: ...

    def close(self) -> None: ...


class PostgresDatabase:
    name = "postgres"
    notifies = True
    holds_itself_only = True
    settings = {"max_wal_size": "4GB", "checkpoint_timeout": "30min"}

    def __init__(self, server: Postgres | None = None) -> None:
        self._own = server is None
        self._server = server or Postgres(shared_buffers="1GB", settings=self.settings).start()

    def create(self) -> str:
        return self._server.create_database(f"bench_{uuid4().hex[:12]}")

    def drop(self, url: str) -> None:
        self._server.drop_database(url.rpartition("/")[2])

    async def raw(self, url: str, prefix: str) -> Side:
        return await RawPostgres.open(url, prefix)

    async def fill(self, url: str, prefix: str, first: int, count: int) -> None:
        connection = await asyncpg.connect(url)
        await connection.execute(
            f"INSERT INTO {prefix}message ({COLUMNS}) SELECT lpad(to_hex(n), 32, '0')::uuid, $1::text, $2::smallint, "
            "$3::bigint + n, 'PENDING', $4::bytea, $3::bigint + n FROM generate_series($5::bigint, $6) n",
            *(QUEUE, PRIORITY, BASE, PAYLOAD, first, first + count - 1),
        )
        await connection.close()

    async def tidy(self, url: str) -> None:
        connection = await asyncpg.connect(url)
        await connection.execute("VACUUM ANALYZE")
        await connection.execute("CHECKPOINT")
        await connection.close()

    @asynccontextmanager
    async def hold(self, url: str) -> AsyncIterator[None]:
        connection = await asyncpg.connect(url)
        await connection.execute("BEGIN ISOLATION LEVEL REPEATABLE READ")
        await connection.fetch("SELECT 1 FROM millpond_message LIMIT 1")
        yield
        await connection.close()

    def cpu(self) -> float:
        return cpu_of(self._server.pid)

    def facts(self) -> Mapping[str, Any]:
        names = ("server_version", "shared_buffers", "max_wal_size", "fsync", "synchronous_commit")
        with self._server.connect() as connection:
            shown = {name: str(*connection.execute(f"SHOW {name}").fetchone() or ()) for name in names}
        return {"driver": f"asyncpg {asyncpg.__version__}", **shown}

    def close(self) -> None:
        if self._own:
            self._server.close()


class MariadbDatabase:
    name = "mariadb"
    notifies = False
    holds_itself_only = False
    settings = {
        "innodb-buffer-pool-size": "1G",
        "innodb-log-file-size": "512M",
        "innodb-flush-log-at-trx-commit": "1",
        "skip-log-bin": "1",
    }

    def __init__(self, server: MariaDB | None = None) -> None:
        self._own = server is None
        self._server = server or MariaDB(settings=self.settings).start()

    def create(self) -> str:
        return self._server.create_database(f"bench_{uuid4().hex[:12]}")

    def drop(self, url: str) -> None:
        self._server.drop_database(url.rpartition("/")[2])

    async def raw(self, url: str, prefix: str) -> Side:
        return await RawMysql.open({**self._server.dsn, "db": url.rpartition("/")[2]}, prefix)

    async def fill(self, url: str, prefix: str, first: int, count: int) -> None:
        with self._server.connect(url.rpartition("/")[2]) as connection, connection.cursor() as cursor:
            cursor.execute(
                f"INSERT INTO {prefix}message ({COLUMNS}) SELECT CAST(LPAD(seq, 16, '0') AS BINARY), %s, %s, "
                f"%s + seq, 'PENDING', %s, %s + seq FROM seq_{first}_to_{first + count - 1}",
                (QUEUE, PRIORITY, BASE, PAYLOAD, BASE),
            )

    async def tidy(self, url: str) -> None:
        """Nothing: InnoDB purges by itself within milliseconds."""

    @asynccontextmanager
    async def hold(self, url: str) -> AsyncIterator[None]:
        with self._server.connect(url.rpartition("/")[2]) as connection, connection.cursor() as cursor:
            cursor.execute("START TRANSACTION WITH CONSISTENT SNAPSHOT")
            yield

    def cpu(self) -> float:
        return cpu_of(self._server.pid)

    def facts(self) -> Mapping[str, Any]:
        names = ("version", "innodb_buffer_pool_size", "innodb_log_file_size", "innodb_flush_log_at_trx_commit")
        with self._server.connect() as connection, connection.cursor() as cursor:
            cursor.execute("SELECT " + ", ".join(f"@@{name}" for name in names))
            shown = dict(zip(names, cursor.fetchone(), strict=True))
        return {"driver": f"asyncmy {version('asyncmy')}", **shown}

    def close(self) -> None:
        if self._own:
            self._server.close()


class SqliteDatabase:
    name = "sqlite"
    notifies = False
    holds_itself_only = True

    def __init__(self) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="millpond-bench-"))

    def create(self) -> str:
        return f"sqlite:///{self._folder / uuid4().hex[:12]}.db"

    def drop(self, url: str) -> None:
        for path in self._folder.glob(f"{Path(_path(url)).name}*"):
            path.unlink()

    async def raw(self, url: str, prefix: str) -> Side:
        return RawSqlite(_path(url), prefix)

    async def fill(self, url: str, prefix: str, first: int, count: int) -> None:
        connection = sqlite3.connect(_path(url))
        connection.execute(
            f"INSERT INTO {prefix}message ({COLUMNS}) WITH RECURSIVE step(n) AS (SELECT ? UNION ALL "
            "SELECT n + 1 FROM step WHERE n < ?) SELECT CAST(printf('%016d', n) AS BLOB), ?, ?, ? + n, 'PENDING', "
            "?, ? + n FROM step",
            (first, first + count - 1, QUEUE, PRIORITY, BASE, PAYLOAD, BASE),
        )
        connection.commit()
        connection.close()

    async def tidy(self, url: str) -> None:
        connection = sqlite3.connect(_path(url))
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        connection.close()

    @asynccontextmanager
    async def hold(self, url: str) -> AsyncIterator[None]:
        connection = sqlite3.connect(_path(url), isolation_level=None)
        connection.execute("BEGIN")
        connection.execute("SELECT 1 FROM millpond_message LIMIT 1").fetchall()
        yield
        connection.close()

    def cpu(self) -> float:
        return 0.0  # there is no server

    def facts(self) -> Mapping[str, Any]:
        return {"driver": f"sqlite3 {sqlite3.sqlite_version}", "journal_mode": "wal", "synchronous": "full"}

    def close(self) -> None:
        shutil.rmtree(self._folder, ignore_errors=True)


def _path(url: str) -> str:
    return url.removeprefix("sqlite:///")
