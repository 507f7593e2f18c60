"""SQL of another program on a store's database: any statement, and triggers that make writes fail."""

from __future__ import annotations

import asyncio
import contextlib
import sqlite3
from collections.abc import AsyncIterator, Iterator
from typing import Any

import psycopg
import pymysql

from tests.rooms.transactions.callers import address, path


def execute(url: str, *texts: str) -> list[tuple[Any, ...]]:
    """Run statements, each committed alone; returns the rows of the last one."""
    if url.startswith("sqlite"):
        with contextlib.closing(sqlite3.connect(path(url), isolation_level=None, timeout=60)) as c:
            return [c.execute(text).fetchall() for text in texts][-1]
    if url.startswith("postgres"):
        with psycopg.connect(url, autocommit=True) as pg:
            results = [pg.execute(text) for text in texts]
            return results[-1].fetchall() if results[-1].description else []
    with contextlib.closing(pymysql.connect(**address(url), autocommit=True)) as my, my.cursor() as cursor:
        for text in texts:
            cursor.execute(text)
        return list(cursor.fetchall())


def id_literal(url: str, id_: Any) -> str:
    return f"'{id_}'" if url.startswith("postgres") else f"x'{id_.hex}'"


@contextlib.contextmanager
def failing(url: str, event: str, table: str, condition: str = "") -> Iterator[None]:
    """Each INSERT, UPDATE or DELETE (`event`) on the table fails; with a condition, that of these rows only.

    The condition names the row as `ROW`.
    """
    name = f"fails_{event.lower()}_{table}"
    row = "OLD" if event == "DELETE" else "NEW"
    when = condition.replace("ROW", row)
    if url.startswith("sqlite"):
        test = f"WHEN {when}" if when else ""
        execute(url, f"CREATE TRIGGER {name} BEFORE {event} ON {table} {test} BEGIN SELECT RAISE(ABORT, 'no'); END")
    elif url.startswith("postgres"):
        test = f"WHEN ({when})" if when else ""
        execute(
            url,
            f"CREATE OR REPLACE FUNCTION {name}() RETURNS trigger LANGUAGE plpgsql AS "
            "$$ BEGIN RAISE EXCEPTION 'no'; END $$",
            f"CREATE TRIGGER {name} BEFORE {event} ON {table} FOR EACH ROW {test} EXECUTE FUNCTION {name}()",
        )
    else:
        signal = "SIGNAL SQLSTATE '45000' SET MESSAGE_TEXT = 'no'"
        body = f"IF {when} THEN {signal}; END IF" if when else signal
        execute(url, f"CREATE TRIGGER {name} BEFORE {event} ON {table} FOR EACH ROW {body}")
    try:
        yield
    finally:
        execute(url, f"DROP TRIGGER {name}" + (f" ON {table}" if url.startswith("postgres") else ""))


@contextlib.asynccontextmanager
async def failing_beside(url: str, event: str, table: str, condition: str = "") -> AsyncIterator[None]:
    """`failing` beside a worker of this event loop: the table's lock waits for its transactions, which must go on."""
    context = failing(url, event, table, condition)
    await asyncio.to_thread(context.__enter__)
    try:
        yield
    finally:
        await asyncio.to_thread(context.__exit__, None, None, None)
