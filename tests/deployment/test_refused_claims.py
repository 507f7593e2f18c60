"""A message that cannot be claimed: the others of its queue are."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Awaitable, Iterator
from contextlib import contextmanager
from typing import Any

import asyncmy
import psycopg
import pytest
from sqlalchemy.ext.asyncio import create_async_engine

import millpond
from millpond import Ack, GiveBack, Message, Millpond, State
from millpond.errors import StoreError
from millpond.transports.database.messages import refused_rows
from tests.rooms.transactions.callers import address, sqlalchemy_url
from tests.shared import KINDS, empty_database
from tests.triggers import execute, failing, id_literal
from tests.waiting import until
from tests.worker.conftest import working


@pytest.fixture(params=KINDS)
def url(request: pytest.FixtureRequest) -> str:
    return empty_database(request, request.param)


@pytest.fixture
async def store(url: str) -> AsyncIterator[Any]:
    store = await millpond.connect(url, migrate=True)
    yield store
    await store.close()


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A refused message is tried again with the next call."""
    monkeypatch.setattr(refused_rows, "_FIRST_PAUSE", 0.0)


@contextmanager
def stubborn(url: str, *ids: Any) -> Iterator[None]:
    chosen = ", ".join(id_literal(url, id_) for id_ in ids)
    with failing(url, "UPDATE", "millpond_message", f"ROW.id IN ({chosen}) AND ROW.state = 'PROCESSING'"):
        yield


async def claimed(store: Any, limit: int = 100, **options: Any) -> list[int]:
    """The numbers of the claimed messages, of the second claim after an error."""
    try:
        claims = await store.claim(["q"], limit, **options)
    except StoreError:
        claims = await store.claim(["q"], limit, **options)
    return [int(claim.message.payload) for claim in claims]


async def publish(store: Any, numbers: Any) -> list[Any]:
    return [p.id for p in await store.publish([Message(queue="q", payload=b"%d" % n) for n in numbers])]


async def test_the_neighbours_are_claimed(url: str, store: Any) -> None:
    ids = await publish(store, range(20))
    with stubborn(url, ids[3], ids[7]):
        assert sorted(await claimed(store)) == sorted(set(range(20)) - {3, 7})
        await publish(store, range(20, 25))
        assert await store.claim(["other"]) == []
        assert sorted(await claimed(store)) == [20, 21, 22, 23, 24]
        assert await claimed(store) == []
    assert sorted(await claimed(store)) == [3, 7]
    await publish(store, [25])
    assert await claimed(store) == [25]


async def test_messages_that_are_claimed_one_by_one(url: str, store: Any) -> None:
    """Also if the first ones are refused, in the order of the others."""
    ids = await publish(store, range(10))
    with stubborn(url, *ids[:3]):
        assert [number for _ in range(7) for number in await claimed(store, 1)] == [3, 4, 5, 6, 7, 8, 9]
        assert await claimed(store, 1) == []


async def test_a_suspect_is_refused_or_claimed_alone(url: str, store: Any) -> None:
    ids = await publish(store, range(4))
    for _ in range(2):
        claims = await store.claim(["q"], ids=ids[:2], limit=2)
        await store.settle([GiveBack(claim.receipt, crashed=True, delay=0) for claim in claims])
    with stubborn(url, ids[0], ids[2]):
        assert await claimed(store) == [3]
        assert await claimed(store, others=False) == [1]
        with pytest.raises(StoreError):
            await claimed(store)  # nothing shows that others could be claimed
    assert await claimed(store) == [2]
    assert await claimed(store) == [0]


async def test_an_error_that_concerns_all_is_raised(url: str, store: Any) -> None:
    await publish(store, range(200))
    with failing(url, "UPDATE", "millpond_message"):
        for _ in range(3):
            with pytest.raises(StoreError):
                await store.claim(["q"], 200)
    assert sorted(await claimed(store, 200)) == list(range(200))


async def test_a_claim_that_is_held_by_a_worker_is_lost_by_none_of_these_errors(url: str, store: Any) -> None:
    await store.workers.join()
    ids = await publish(store, range(20))
    with stubborn(url, ids[3]):
        for _ in range(5):
            await claimed(store, by_worker=True)
        await store.workers.reap()
    assert len(store.workers.abandoned._tokens) <= 2  # of the first claims, which were tried in the usual way
    rows = execute(url, "SELECT state, count(*) FROM millpond_message GROUP BY state ORDER BY state")
    assert rows == [("PENDING", 1), ("PROCESSING", 19)]


async def test_a_worker_handles_the_neighbours(url: str, store: Any) -> None:
    ids = await publish(store, range(20))
    pond = Millpond(url)
    handled = set()

    @pond.subscriber("q")
    async def handle(body: int) -> None:
        handled.add(body)

    with stubborn(url, ids[3]):
        async with working(pond):
            await until(lambda: handled == set(range(20)) - {3})
    await pond.close()


async def test_a_message_whose_body_cannot_be_read_fails_alone(postgres_url: str) -> None:
    """A part of the database's files is lost."""
    store: Any = await millpond.connect(postgres_url, migrate=True)
    published = await store.publish([Message(queue="q", payload=b"%d" % n + bytes(20_000)) for n in range(5)])
    with psycopg.connect(postgres_url, autocommit=True) as c:
        c.execute("ALTER TABLE millpond_message ALTER payload SET STORAGE EXTERNAL")
        bad = (await store.publish([Message(queue="q", payload=bytes(20_000))]))[0].id
        (toast,) = c.execute(
            "SELECT reltoastrelid::regclass::text FROM pg_class WHERE oid = 'millpond_message'::regclass"
        ).fetchone() or ("",)
        c.execute("SET allow_system_table_mods = on")
        c.execute("UPDATE pg_class SET relkind = 'r' WHERE oid = %s::regclass", (toast,))
        assert c.execute(f"DELETE FROM {toast}").rowcount > 0
        c.execute("UPDATE pg_class SET relkind = 't' WHERE oid = %s::regclass", (toast,))
        c.execute("VACUUM millpond_message")
    with pytest.raises(StoreError):
        await store.claim(["q"], 100)
    claims = await store.claim(["q"], 100)
    assert {claim.receipt.id for claim in claims} == {p.id for p in published}
    assert await store.settle([Ack(claim.receipt) for claim in claims]) == []
    assert await store.claim(["q"], 100) == []
    (row,) = await store.operations.archived("q", states=[State.FAILED])
    assert (row.id, row.reason, row.payload, row.attempts) == (bad, "unreadable", b"", 0)
    assert "chunk" in row.error
    await store.close()


@contextlib.asynccontextmanager
async def connected(url: str, driver: str | None) -> AsyncIterator[Any]:
    """A store on MariaDB. `driver`: that of the caller's own pool."""
    async with contextlib.AsyncExitStack() as stack:
        options = {}
        if driver == "asyncmy":
            options["pool"] = await stack.enter_async_context(asyncmy.create_pool(**address(url), minsize=1, maxsize=3))
        elif driver == "sqlalchemy":
            engine = options["pool"] = create_async_engine(sqlalchemy_url(url, "asyncmy"), pool_size=3, max_overflow=0)
            stack.push_async_callback(engine.dispose)
        store = await millpond.connect("mysql://" if options else url, reconnect_timeout=5, **options)
        stack.push_async_callback(store.close)
        yield store


@pytest.mark.parametrize("driver", [None, "asyncmy", "sqlalchemy"])
async def test_a_text_that_the_driver_cannot_decode_fails_alone(shared_mariadb: Any, driver: str | None) -> None:
    """Half of a surrogate pair, which MariaDB takes for UTF-8: the driver stops in the middle of a result."""
    shared_mariadb.empty()
    async with connected(shared_mariadb.url, driver) as store:
        await _fails_alone(shared_mariadb.url, store)


async def _fails_alone(url: str, store: Any) -> None:
    ids = [p.id for p in await store.publish([Message(queue="q", key="k", payload=b"%d" % n) for n in range(10)])]
    for column, id_ in (("headers", ids[3]), ("`key`", ids[7])):
        execute(url, f"UPDATE millpond_message SET {column} = x'EDA080' WHERE id = {id_literal(url, id_)}")
    with pytest.raises(UnicodeDecodeError):
        await store.claim(["q"], 100)
    claims = await store.claim(["q"], 100)
    assert {claim.receipt.id for claim in claims} == set(ids) - {ids[3], ids[7]}
    assert await store.settle([Ack(claim.receipt) for claim in claims]) == []

    async def archived() -> bool:
        await store.claim(["q"], 100)
        return bool(execute(url, "SELECT count(*) FROM millpond_message") == [(0,)])

    await until(archived)
    failed = await store.operations.archived(states=[State.FAILED])
    assert {row.id: (row.reason, row.key) for row in failed} == {
        ids[3]: ("unreadable", "k"),
        ids[7]: ("unreadable", None),
    }


async def test_a_message_that_is_not_read_in_time_keeps_its_body(postgres_url: str) -> None:
    """The server's `statement_timeout` ends each try: that says nothing about the row, which may be read later."""
    store: Any = await millpond.connect(postgres_url, migrate=True)
    slow, *others = await publish(store, range(4))
    await store.close()
    with psycopg.connect(postgres_url, autocommit=True) as c:
        columns = [name for (name,) in c.execute(_COLUMNS).fetchall()]
        shown = ", ".join(_SLOW.format(slow=slow) if name == "payload" else f"b.{name}" for name in columns)
        # STABLE: only a statement that reads the body calls it.
        c.execute(f"CREATE FUNCTION slow_body() RETURNS bytea STABLE LANGUAGE plpgsql AS {_NEVER}")
        c.execute("ALTER TABLE millpond_message RENAME TO behind")
        c.execute(f"CREATE VIEW millpond_message AS SELECT {shown} FROM behind b")
        c.execute(f"ALTER DATABASE {c.info.dbname} SET statement_timeout = '500ms'")
    store = await millpond.connect(postgres_url)
    found: set[Any] = set()

    async def claim() -> int:
        with contextlib.suppress(StoreError):
            found.update(claim.receipt.id for claim in await store.claim(["q"], 100))
        return len(found)

    await until(lambda: _is(claim(), 3))
    for _ in range(3):
        await claim()
    assert found == set(others)
    assert await store.operations.archived("q") == []
    with psycopg.connect(postgres_url, autocommit=True) as c:
        c.execute("DROP VIEW millpond_message")
        c.execute("ALTER TABLE behind RENAME TO millpond_message")
    await until(lambda: _is(claim(), 4))
    (row,) = await store.operations.find([slow])
    assert (row.state, row.payload) == (State.PROCESSING, b"0")
    await store.close()


async def _is(number: Awaitable[int], wanted: int) -> bool:
    return await number == wanted


_NEVER = "$$ BEGIN PERFORM pg_sleep(600); END $$"
_COLUMNS = "SELECT column_name FROM information_schema.columns WHERE table_name = 'millpond_message' ORDER BY 1"
_SLOW = "CASE WHEN b.id = '{slow}' THEN slow_body() ELSE b.payload END AS payload"
