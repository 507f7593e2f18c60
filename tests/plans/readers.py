"""The number of rows that a database reads for the steps of an operation, by the counters of that database.

Steps, texts and session settings are those of the store. Every statement runs in one transaction, which is rolled
back: the next test finds all rows unchanged.
"""

import sqlite3
from collections.abc import Iterator, Sequence
from typing import Any, Protocol, TypeVar

import psycopg
import pymysql

from millpond.transports.database.mysql.dialect import MysqlDialect
from millpond.transports.database.postgres.dialect import PostgresDialect
from millpond.transports.database.sql.dialect import Dialect
from millpond.transports.database.sql.statement import Copy, Many, Query, Rows, Statement, Step, Steps, Style, drive
from millpond.transports.database.sqlite.dialect import SqliteDialect

T = TypeVar("T")


class Reader(Protocol):
    dialect: Dialect

    def read(self, steps: Steps[T]) -> tuple[T, int]:
        """The result of the steps and the approximate number of rows that they read."""

    def scans(self) -> list[str]:
        """Tables that were read from end to end so far."""

    def rollback(self) -> None: ...

    def close(self) -> None: ...


class PostgresReader:
    """EXPLAIN ANALYZE of prepared statements. Their plans are made once and kept, as in the store."""

    def __init__(self, url: str, settings: str) -> None:
        self.dialect = PostgresDialect()
        self._connection = psycopg.connect(url)
        self._settings = settings
        self._cursor = psycopg.ClientCursor(self._connection)  # EXECUTE takes values only as part of its text
        self._names: dict[str, str] = {}
        self._rows = 0
        self._scans: list[str] = []

    def read(self, steps: Steps[T]) -> tuple[T, int]:
        self._cursor.execute(self._settings)
        self._rows = 0
        return drive(steps, self._run), self._rows

    def scans(self) -> list[str]:
        return self._scans

    def rollback(self) -> None:
        self._connection.rollback()
        self._scans = []

    def close(self) -> None:
        self._connection.close()

    def _run(self, step: Step) -> Rows:
        match step:
            case Query(statement, params):
                return self._execute(*statement.render(Style.DOLLAR, params))
            case Many(statement, columns, records):
                text, rows = statement.render_many(Style.DOLLAR, columns, records)
                for values in rows:
                    self._execute(text, values)
                return ()
            case Copy():
                raise AssertionError("no plan to look at")

    def _execute(self, text: str, values: Sequence[Any]) -> Rows:
        name = self._names.get(text)
        if name is None:
            name = self._names[text] = f"statement_{len(self._names)}"
            self._cursor.execute(f"PREPARE {name} AS {text}")
        call = f"EXECUTE {name}" + (f" ({', '.join(['%s'] * len(values))})" if values else "")
        self._cursor.execute("SAVEPOINT before")
        self._cursor.execute(f"EXPLAIN (ANALYZE, BUFFERS, FORMAT JSON) {call}", values)
        ((explained,),) = self._cursor.fetchall()
        self._cursor.execute("ROLLBACK TO before")
        self._count_rows(explained[0]["Plan"], text)
        self._cursor.execute(call, values)
        return self._cursor.fetchall() if self._cursor.description else ()

    def _count_rows(self, node: dict[str, Any], text: str) -> None:
        if "Relation Name" in node and node["Node Type"] != "ModifyTable":
            read = node["Actual Rows"] + node.get("Rows Removed by Filter", 0)
            read += node.get("Rows Removed by Index Recheck", 0)
            self._rows += read * node["Actual Loops"]
            if node["Node Type"] == "Seq Scan":
                self._scans.append(f"{node['Relation Name']}: {text}")
        for part in node.get("Plans", ()):
            self._count_rows(part, text)


class MariadbReader:
    """The server counts the reads of its storage engines."""

    def __init__(self, connection: pymysql.Connection) -> None:
        self.dialect = MysqlDialect()
        self._connection = connection
        self._cursor = connection.cursor()
        self._cursor.execute("SET SESSION TRANSACTION ISOLATION LEVEL READ COMMITTED")
        self._cursor.execute("SET sql_mode = 'STRICT_ALL_TABLES'")
        before = self._read_counters()
        self._own = {
            name: n - before[name] for name, n in self._read_counters().items()
        }  # reading the counter is counted too
        self._scans: list[str] = []
        self._connection.begin()

    def read(self, steps: Steps[T]) -> tuple[T, int]:
        before = self._read_counters()
        result = drive(steps, self._run)
        read = {name: n - before[name] - self._own[name] for name, n in self._read_counters().items()}
        # Tables in memory, such as a list of ids from JSON, are read from end to end; the store's tables never are.
        if read.pop("Handler_read_rnd_next") > 10_000:
            self._scans.append(f"{read}")
        return result, sum(read.values())

    def scans(self) -> list[str]:
        return self._scans

    def rollback(self) -> None:
        self._connection.rollback()
        self._connection.begin()
        self._scans = []

    def close(self) -> None:
        self._connection.close()

    def _read_counters(self) -> dict[str, int]:
        self._cursor.execute("SHOW SESSION STATUS LIKE 'Handler_read%'")
        return {name: int(value) for name, value in self._cursor.fetchall()}

    def _run(self, step: Step) -> Rows:
        match step:
            case Query(statement, params):
                self._cursor.execute(*statement.render(Style.FORMAT, params))
                return self._cursor.fetchall()
            case Many(statement, columns, records):
                self._cursor.executemany(*statement.render_many(Style.FORMAT, columns, records))
                return ()
            case Copy():
                raise AssertionError("there is none here")


class SqliteReader:
    """Instructions of SQLite's virtual machine, divided by the usual number for a row; EXPLAIN shows the scans."""

    PER_ROW = 60
    EVERY = 20

    def __init__(self, path: str) -> None:
        self.dialect = SqliteDialect()
        self._connection = sqlite3.connect(path, isolation_level=None)
        self._connection.set_progress_handler(self._count, self.EVERY)
        self._instructions = 0
        self._scans: list[str] = []

    def fill(self, statements: Iterator[str]) -> None:
        self._connection.set_progress_handler(None, 0)
        self._connection.execute("BEGIN")
        for statement in statements:
            self._connection.execute(statement)
        self._connection.execute("COMMIT")

    def read(self, steps: Steps[T]) -> tuple[T, int]:
        if not self._connection.in_transaction:
            self._connection.execute("BEGIN IMMEDIATE")
        self._instructions = 0
        result = drive(steps, self._run)
        return result, self._instructions // self.PER_ROW

    def scans(self) -> list[str]:
        return self._scans

    def rollback(self) -> None:
        self._connection.execute("ROLLBACK")
        self._scans = []

    def close(self) -> None:
        self._connection.close()

    def _count(self) -> int:
        self._instructions += self.EVERY
        return 0

    def _run(self, step: Step) -> Rows:
        match step:
            case Query(statement, params):
                text, values = statement.render(Style.QMARK, params)
                self._explain(statement, text, values)
                return self._connection.execute(text, values).fetchall()
            case Many(statement, columns, records):
                text, rows = statement.render_many(Style.QMARK, columns, records)
                self._explain(statement, text, rows[0])
                self._connection.executemany(text, rows)
                return ()
            case Copy():
                raise AssertionError("there is none here")

    def _explain(self, statement: Statement, text: str, values: Sequence[Any]) -> None:
        counted = self._instructions
        for line in self._plan(text, values):
            if line.startswith("SCAN") and "VIRTUAL TABLE" not in line and line != "SCAN CONSTANT ROW":
                self._scans.append(f"{line}: {statement.text}")
        self._instructions = counted

    def _plan(self, text: str, values: Sequence[Any]) -> Iterator[str]:
        for row in self._connection.execute(f"EXPLAIN QUERY PLAN {text}", values):
            yield row[3]
