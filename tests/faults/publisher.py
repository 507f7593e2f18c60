"""A publisher that repeatedly writes its own row and publishes a message in one transaction.

Run as `python -m tests.faults.publisher`; it runs until it is killed.
"""

from __future__ import annotations

import asyncio
import ctypes
import itertools
import signal
import sqlite3
from pathlib import Path
from typing import Any

from millpond import Millpond
from tests.faults.aim import Aimed
from tests.faults.effects import Effects
from tests.faults.history import History
from tests.faults.plan import Plan

ROW = "INSERT INTO orders (number) VALUES (?)"

plan = Plan.of_this_process()
aimed = Aimed(plan.aim)
history = History(Path(plan.folder) / "history")
pond = Millpond(plan.url)


def publish(number: str, connection: Any, mark: str) -> None:
    cursor = connection.cursor()
    cursor.execute(ROW.replace("?", mark), [number])
    aimed.at("row")
    pond.publish_sync("orders", number, within=connection)
    aimed.at("published")
    aimed.soon("committing")
    connection.commit()
    cursor.close()


def numbers() -> Any:
    for n in itertools.count():
        number = f"{plan.producer}-{n}"
        yield number
        history.write(confirmed=number)


def with_psycopg() -> None:
    import psycopg

    with psycopg.connect(plan.url) as connection:
        for number in numbers():
            publish(number, connection, "%s")


def with_pymysql() -> None:
    import pymysql

    connection = Effects(plan.url).connect()
    assert isinstance(connection, pymysql.Connection)
    connection.autocommit(False)
    for number in numbers():
        publish(number, connection, "%s")


def with_sqlite3() -> None:
    connection = sqlite3.connect(plan.url.removeprefix("sqlite:///"), timeout=30)
    for number in numbers():
        publish(number, connection, "?")


def with_asyncpg() -> None:
    import asyncpg

    async def run() -> None:
        connection = await asyncpg.connect(plan.url)
        for number in numbers():
            async with connection.transaction():
                await connection.execute(ROW.replace("?", "$1"), number)
                aimed.at("row")
                await pond.publish("orders", number, within=connection)
                aimed.at("published")
                aimed.soon("committing")

    asyncio.run(run())


DRIVERS = {"psycopg": with_psycopg, "asyncpg": with_asyncpg, "sqlite3": with_sqlite3, "PyMySQL": with_pymysql}

if __name__ == "__main__":
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: no process outlives its test
    DRIVERS[plan.driver]()
