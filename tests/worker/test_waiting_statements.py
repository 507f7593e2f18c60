"""A settle whose statement waits, for a lock or anything else, stops no other result.

The archive has a trigger or a foreign key of the user's, which waits for a row of the user's table `gate`.
"""

import asyncio
import contextlib
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any
from uuid import UUID

import psycopg
import pymysql
import pytest

from millpond import Millpond, State
from tests.rooms.transactions.callers import address
from tests.triggers import execute, id_literal
from tests.waiting import IS_WAITING, mariadb_waits, until
from tests.worker.conftest import counts, on, working

databases = on("postgresql", "mariadb")

PATIENT = {"busy_timeout": 600, "call_timeout": 600}
"""A statement alone would wait longer than the tests do."""
NAME = {"postgresql": 'text COLLATE "C"', "mysql": "VARCHAR(255) CHARACTER SET utf8mb4 COLLATE utf8mb4_bin"}
"""The type of a queue's name, by the scheme of the URL."""


@contextlib.contextmanager
def gates(url: str, *names: str) -> Iterator[None]:
    """The user's table, with these rows."""
    type_ = NAME[url.partition("://")[0]]
    execute(url, f"CREATE TABLE gate (name {type_} PRIMARY KEY)")
    for name in names:
        execute(url, f"INSERT INTO gate VALUES ('{name}')")
    try:
        yield
    finally:
        execute(url, "DROP TABLE gate")


@contextlib.contextmanager
def locked(url: str, name: str) -> Iterator[None]:
    """A transaction that has locked one row of the user's table."""
    connection: Any = psycopg.connect(url) if url.startswith("postgres") else pymysql.connect(**address(url))
    with connection, connection.cursor() as cursor:
        cursor.execute("SELECT name FROM gate WHERE name = %s FOR UPDATE", (name,))
        assert len(cursor.fetchall()) == 1
        yield
        connection.rollback()


@contextlib.contextmanager
def before_archiving(url: str, postgres: str, mariadb: str) -> Iterator[None]:
    """A trigger of the user's on the archive; `NEW` is the message."""
    if url.startswith("postgres"):
        execute(
            url,
            f"CREATE FUNCTION at_gate() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN {postgres}; RETURN NEW; END $$",
            "CREATE TRIGGER at_gate BEFORE INSERT ON millpond_archive FOR EACH ROW EXECUTE FUNCTION at_gate()",
        )
        end = ("DROP TRIGGER at_gate ON millpond_archive", "DROP FUNCTION at_gate")
    else:
        execute(
            url,
            f"CREATE TRIGGER at_gate BEFORE INSERT ON millpond_archive FOR EACH ROW BEGIN NOT ATOMIC {mariadb}; END",
        )
        end = ("DROP TRIGGER at_gate",)
    try:
        yield
    finally:
        execute(url, *end)


def locks_gate(url: str, id_: UUID) -> contextlib.AbstractContextManager[None]:
    """The user's trigger locks a row for this message."""
    this = f"NEW.id = {id_literal(url, id_)}"
    return before_archiving(
        url,
        f"IF {this} THEN PERFORM 1 FROM gate WHERE name = 'one' FOR UPDATE; END IF",
        f"IF {this} THEN SELECT name INTO @name FROM gate WHERE name = 'one' FOR UPDATE; END IF",
    )


def waits_for_gate(url: str, id_: UUID) -> contextlib.AbstractContextManager[None]:
    """The user's trigger waits for this message, without a lock of a row, while the gate is closed."""
    this = f"NEW.id = {id_literal(url, id_)}"
    return before_archiving(
        url,
        f"WHILE {this} AND EXISTS (SELECT 1 FROM gate) LOOP PERFORM pg_sleep(0.02); END LOOP",
        f"IF {this} THEN DO GET_LOCK('gate', 600); DO RELEASE_LOCK('gate'); END IF",
    )


@contextlib.contextmanager
def closed(url: str) -> Iterator[None]:
    """The gate is closed while the context lasts."""
    if url.startswith("postgres"):
        with gates(url, "one"):
            yield
            execute(url, "DELETE FROM gate")
        return
    with pymysql.connect(**address(url)) as connection, connection.cursor() as cursor:
        cursor.execute("SELECT GET_LOCK('gate', 0)")
        yield


@contextlib.contextmanager
def foreign_key(url: str) -> Iterator[None]:
    """Each archived message refers to the gate of its queue."""
    execute(url, "ALTER TABLE millpond_archive ADD CONSTRAINT known_queue FOREIGN KEY (queue) REFERENCES gate (name)")
    kind = "CONSTRAINT" if url.startswith("postgres") else "FOREIGN KEY"
    try:
        yield
    finally:
        execute(url, "DELETE FROM millpond_archive", f"ALTER TABLE millpond_archive DROP {kind} known_queue")


@pytest.fixture
def runs(make_pond: Callable[..., Millpond]) -> tuple[Millpond, Counter[int]]:
    """A pond whose statements wait for long, and the number of runs of each body of the queue `q`."""
    runs: Counter[int] = Counter()
    pond = make_pond(**PATIENT)

    @pond.subscriber("q", max_workers=1000)
    async def handle(body: int) -> None:
        runs[body] += 1
        await asyncio.sleep(0)

    return pond, runs


async def is_waiting(url: str) -> bool:
    return bool(execute(url, IS_WAITING)) if url.startswith("postgres") else mariadb_waits(partial(execute, url))


async def completed(pond: Millpond, number: int, queue: str = "q") -> bool:
    return (await counts(pond, queue)).get(State.COMPLETED, 0) == number


@databases
async def test_a_lock_that_a_trigger_waits_for(runs: tuple[Millpond, Counter[int]], url: str) -> None:
    """Also results of the same batch are written, and the one that waits when the lock is gone."""
    pond, ran = runs
    ids = await pond.publish_many("q", range(400))
    with gates(url, "one"), locks_gate(url, ids[100]):
        async with working(pond):
            with locked(url, "one"):
                await until(lambda: completed(pond, 399))
                await pond.publish_many("q", range(400, 500))
                await until(lambda: completed(pond, 499))
            await until(lambda: completed(pond, 500))
            assert pond.worker is not None and pond.worker.lost == 0
    assert set(ran.values()) == {1}


@databases
async def test_a_trigger_that_waits_without_a_lock(runs: tuple[Millpond, Counter[int]], url: str) -> None:
    """No limit of locks ends it: later results pass it by."""
    pond, ran = runs
    (id_,) = await pond.publish_many("q", [0])
    with waits_for_gate(url, id_):
        async with working(pond):
            with closed(url):
                await until(lambda: ran[0] == 1)
                for n in range(5):
                    await pond.publish_many("q", range(n * 40 + 1, n * 40 + 41))
                    await until(lambda n=n: completed(pond, n * 40 + 40))
            await until(lambda: completed(pond, 201))
            assert pond.worker is not None and pond.worker.lost == 0
    assert set(ran.values()) == {1}


@databases
async def test_a_foreign_key_whose_row_is_locked(runs: tuple[Millpond, Counter[int]], url: str) -> None:
    """All results of one queue wait for it, and those of another queue are written."""
    pond, ran = runs
    others: Counter[int] = Counter()

    @pond.subscriber("held", max_workers=20, fetch=20)
    async def handle(body: int) -> None:
        others[body] += 1

    with gates(url, "q", "held"), foreign_key(url):
        async with working(pond):
            with locked(url, "held"):
                await pond.publish_many("held", range(300))
                await until(lambda: len(others) >= 20)
                for n in range(10):
                    await pond.publish_many("q", range(n * 20, n * 20 + 20))
                    await until(lambda n=n: completed(pond, n * 20 + 20))
                assert await completed(pond, 0, "held")
            await until(lambda: completed(pond, 300, "held"))
            assert pond.worker is not None and pond.worker.lost == 0
        assert set(ran.values()) == set(others.values()) == {1}
