"""Effects of handlers in the database: one row for each run, outside or inside the transaction that acks.

They are written by synchronous drivers, one connection per thread; each row is durable on return.
"""

from __future__ import annotations

import contextlib
import sqlite3
import threading
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from millpond import Delivery

OUTSIDE, INSIDE = "outside", "inside"

TABLE = """
CREATE TABLE effects (
number VARCHAR(60) NOT NULL, place VARCHAR(10) NOT NULL, deliveries INT NOT NULL, redelivered INT NOT NULL,
pid INT NOT NULL)
"""
COMMIT = "COMMIT /* by the handler */"
"""The comment lets a proxy distinguish this commit from those of the worker."""
ROW = "INSERT INTO effects (number, place, deliveries, redelivered, pid) VALUES (?, ?, ?, ?, ?)"


class Run(NamedTuple):
    """One run of a handler."""

    number: str
    place: str
    deliveries: int
    redelivered: int
    pid: int


class Effects:
    """The effects table of one database."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._mark = "?" if url.startswith("sqlite") else "%s"
        self._local = threading.local()

    def write(self, run: Run) -> None:
        """Outside of any transaction."""
        self.execute(ROW, run)

    @contextlib.contextmanager
    def transaction(self) -> Iterator[Any]:
        """A transaction; its connection is accepted by `within=`."""
        with self._connected() as connection:
            self._execute(connection, "BEGIN IMMEDIATE" if self._mark == "?" else "BEGIN")
            yield connection
            self._execute(connection, COMMIT)

    def write_in(self, connection: Any, run: Run) -> None:
        self._execute(connection, ROW, run)

    def runs(self) -> list[Run]:
        return [Run(*row) for row in self.execute("SELECT number, place, deliveries, redelivered, pid FROM effects")]

    def execute(self, text: str, values: Sequence[Any] = ()) -> list[Any]:
        with self._connected() as connection:
            return self._execute(connection, text, values)

    def _execute(self, connection: Any, text: str, values: Sequence[Any] = ()) -> list[Any]:
        cursor = connection.cursor()
        try:
            cursor.execute(text.replace("?", self._mark), values)
            return list(cursor.fetchall()) if cursor.description else []
        finally:
            cursor.close()

    @contextlib.contextmanager
    def _connected(self) -> Iterator[Any]:
        """This thread's connection. Any error closes it, which rolls back; the next call opens a new one."""
        connection = getattr(self._local, "connection", None)
        if connection is None:
            connection = self._local.connection = self.connect()
        try:
            yield connection
        except BaseException:
            self.close()
            raise

    def connect(self) -> Any:
        """A connection in autocommit. Each driver is imported when needed, because processes must start quickly."""
        url = self._url
        if url.startswith("sqlite"):
            return sqlite3.connect(url.removeprefix("sqlite:///"), isolation_level=None, timeout=30)
        if url.startswith("postgres"):
            import psycopg

            # Never prepared: the proxy searches for the text of a statement.
            return psycopg.connect(url, autocommit=True, connect_timeout=5, prepare_threshold=None)
        import pymysql

        at = urlsplit(url)
        login = {"host": at.hostname, "port": at.port, "user": at.username, "password": at.password}
        return pymysql.connect(**login, database=at.path[1:], autocommit=True, connect_timeout=5, read_timeout=30)

    def close(self) -> None:
        """This thread's connection."""
        connection, self._local.connection = getattr(self._local, "connection", None), None
        if connection is not None:
            with contextlib.suppress(Exception):  # it may be broken already
                connection.close()


def run_of(delivery: Delivery, number: str, place: str, pid: int) -> Run:
    return Run(number, place, delivery.claim.deliveries, int(delivery.redelivered), pid)
