"""Errors that prove a damaged row: only these let a message fail without its body."""

import sqlite3
import ssl
from contextlib import closing

import asyncmy.errors
import asyncpg
import pytest

from millpond.transports.database.mysql.dialect import MysqlDialect
from millpond.transports.database.postgres.dialect import PostgresDialect
from millpond.transports.database.sql.dialect import Dialect
from millpond.transports.database.sqlite.dialect import SqliteDialect

DIALECTS: list[Dialect] = [SqliteDialect(), PostgresDialect(), MysqlDialect()]


def _sqlite(code: int) -> sqlite3.Error:
    error = sqlite3.DatabaseError("no")
    error.sqlite_errorcode = code  # type: ignore[attr-defined,unused-ignore]
    return error


@pytest.mark.parametrize(
    ("dialect", "error"),
    [
        (PostgresDialect(), asyncpg.DataCorruptedError("missing chunk number 0")),
        (PostgresDialect(), asyncpg.IndexCorruptedError("right sibling's left-link doesn't match")),
        (PostgresDialect(), asyncpg.CharacterNotInRepertoireError("invalid byte sequence")),
        (MysqlDialect(), asyncmy.errors.InternalError(1034, "Index for table is corrupt")),
        (SqliteDialect(), _sqlite(sqlite3.SQLITE_CORRUPT)),
        *((dialect, UnicodeDecodeError("utf-8", b"\xff", 0, 1, "invalid start byte")) for dialect in DIALECTS),
    ],
)
def test_damage(dialect: Dialect, error: Exception) -> None:
    assert dialect.is_damage(error)


def test_text_that_is_no_utf_8() -> None:
    with closing(sqlite3.connect(":memory:")) as connection, pytest.raises(sqlite3.Error) as raised:
        connection.execute("SELECT CAST(x'ff' AS TEXT)").fetchone()
    assert SqliteDialect().is_damage(raised.value)


@pytest.mark.parametrize(
    ("dialect", "error"),
    [
        (PostgresDialect(), asyncpg.QueryCanceledError("statement timeout")),
        (PostgresDialect(), asyncpg.InternalServerError("tuple concurrently updated")),
        (PostgresDialect(), asyncpg.InternalServerError("cache lookup failed for relation 16384")),
        (PostgresDialect(), asyncpg.OutOfMemoryError("out of memory")),
        (PostgresDialect(), asyncpg.PostgresIOError("could not read block")),
        (PostgresDialect(), asyncpg.InsufficientPrivilegeError("permission denied")),
        (MysqlDialect(), asyncmy.errors.OperationalError(3024, "maximum statement execution time exceeded")),
        (MysqlDialect(), asyncmy.errors.OperationalError(1021, "disk full")),
        (SqliteDialect(), _sqlite(sqlite3.SQLITE_NOMEM)),
        (SqliteDialect(), _sqlite(sqlite3.SQLITE_IOERR)),
        *(
            (dialect, error)
            for dialect in DIALECTS
            for error in (MemoryError(), OSError("no"), TimeoutError(), ssl.SSLCertVerificationError(1, "has expired"))
        ),
    ],
)
def test_a_cause_that_may_end(dialect: Dialect, error: Exception) -> None:
    assert not dialect.is_damage(error)
