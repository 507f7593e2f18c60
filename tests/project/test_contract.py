"""The public contract of publishing and the seam runs as the design shows it."""

import asyncio
import sqlite3
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any
from urllib.parse import urlsplit
from uuid import UUID

import aiosqlite
import asyncpg
import psycopg
import pytest
from sqlalchemy import create_engine
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from sqlalchemy.orm import Session

import millpond
from millpond import Ack, GiveBack, Message, Millpond, Nack, Receipt, Reject, State
from millpond.codec import CONTENT_TYPE
from millpond.errors import Unsupported, WrongConnection


@dataclass
class Order:
    sku: int


@pytest.fixture(params=["sqlite", "postgres"])
def url(request: pytest.FixtureRequest) -> str:
    """A migrated database."""
    url: str = request.getfixturevalue(f"{request.param}_url")

    async def migrate() -> None:
        await (await millpond.connect(url, migrate=True)).close()

    asyncio.run(migrate())
    return url


@asynccontextmanager
async def async_session(url: str) -> AsyncIterator[AsyncSession]:
    engine = create_async_engine(
        url.replace("sqlite:", "sqlite+aiosqlite:").replace("postgresql:", "postgresql+asyncpg:")
    )
    async with AsyncSession(engine) as session:
        yield session
    await engine.dispose()


@contextmanager
def session(url: str) -> Iterator[Session]:
    engine = create_engine(url.replace("postgresql:", "postgresql+psycopg:"))
    with Session(engine) as session:
        yield session
    engine.dispose()


@asynccontextmanager
async def transaction(url: str) -> AsyncIterator[Any]:
    """A connection of the caller, in a transaction that is committed at the end."""
    if url.startswith("sqlite"):
        async with aiosqlite.connect(urlsplit(url).path[1:]) as connection:
            await connection.execute("BEGIN IMMEDIATE")
            yield connection
            await connection.commit()
    else:
        connection = await asyncpg.connect(url)
        async with connection.transaction():
            yield connection
        await connection.close()


async def test_publish(url: str) -> None:
    bodies = [{"sku": 1}, "text", b"bytes"]
    order = Order(sku=8)
    moment = datetime.now(UTC) + timedelta(hours=1)

    pond = Millpond(url)
    id = await pond.publish(
        "orders", {"sku": 7}, id=None, key="customer-7", priority=10, delay=60, expires=None, headers={"trace": "x"}
    )
    ids = await pond.publish_many("orders", bodies)
    async with async_session(url) as session, session.begin():
        await pond.publish("orders", order, due_at=moment, within=session)

    store = await pond.transport
    rows = {row.id: row for row in await store.operations.browse("orders")}
    assert len(rows) == 5
    first = rows[id]
    assert (first.payload, first.key, first.priority, first.headers) == (b'{"sku":7}', "customer-7", 10, {"trace": "x"})
    assert first.due_us - first.created_us == 60_000_000
    assert [rows[id].payload for id in ids] == [b'{"sku":1}', b"text", b"bytes"]
    assert [rows[id].headers.get(CONTENT_TYPE) for id in ids] == [
        None,
        "text/plain; charset=utf-8",
        "application/octet-stream",
    ]
    (within,) = [row for row in rows.values() if row.payload == b'{"sku":8}']
    assert within.due_at == moment
    await pond.close()


async def test_publish_within_leaves_no_trace_when_it_is_rolled_back(url: str) -> None:
    async with Millpond(url) as pond:
        async with async_session(url) as session:
            await pond.publish("orders", 1, within=session)
            await session.rollback()
        assert await (await pond.transport).operations.browse("orders") == []


def test_publish_sync_within_a_session_needs_no_event_loop(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pond = Millpond(url)
    with session(url) as ours, monkeypatch.context() as patch:
        patch.setattr(asyncio, "new_event_loop", None)  # code that needs a loop would fail now
        with ours.begin():
            id_ = pond.publish_sync("orders", Order(sku=9), within=ours)
        with ours.begin() as transaction:
            pond.publish_sync("orders", Order(sku=10), within=ours)
            transaction.rollback()

    async def look() -> list[UUID]:
        store = await millpond.connect(url)
        rows = await store.operations.browse("orders")
        await store.close()
        return [row.id for row in rows]

    assert asyncio.run(look()) == [id_]


def test_publish_sync_within_a_driver_connection(url: str) -> None:
    pond = Millpond(url)
    if url.startswith("sqlite"):
        connection = sqlite3.connect(urlsplit(url).path[1:])
        connection.execute("BEGIN IMMEDIATE")
        pond.publish_sync("orders", 1, within=connection)
        connection.commit()
        assert connection.execute("SELECT count(*) FROM millpond_message").fetchone() == (1,)
        connection.close()
    else:
        with psycopg.connect(url) as postgres:
            pond.publish_sync("orders", 1, within=postgres)
        with psycopg.connect(url) as postgres:
            assert postgres.execute("SELECT count(*) FROM millpond_message").fetchone() == (1,)
    with pytest.raises(WrongConnection, match="within="):
        pond.publish_sync("orders", 1, within=object())


def test_publish_sync_alone_works_from_anywhere(url: str) -> None:
    pond = Millpond(url)
    ids = [pond.publish_sync("orders", 1)]

    async def inside() -> None:
        ids.append(pond.publish_sync("orders", 2))
        ids.append(await pond.publish("orders", 3))
        ids.append(await asyncio.to_thread(pond.publish_sync, "orders", 4))
        rows = await (await pond.transport).operations.browse("orders")
        assert sorted(row.id for row in rows) == sorted(ids)
        await pond.close()

    asyncio.run(inside())


def test_publish_sync_after_a_fork(sqlite_url: str) -> None:
    """Servers fork after a program has published; the child does not have the threads of the parent."""
    code = f"""
import os, warnings
from millpond import Millpond
pond = Millpond({sqlite_url!r})
pond.publish_sync("orders", 1)
child = os.fork()
if child == 0:
    pond.publish_sync("orders", 2)
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
pond.publish_sync("orders", 3)
pond.close_sync()
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=30, capture_output=True)
    with sqlite3.connect(urlsplit(sqlite_url).path[1:]) as connection:
        assert connection.execute("SELECT count(*) FROM millpond_message").fetchone() == (3,)
    connection.close()


async def test_publish_sync_on_memory_goes_to_the_pond_that_is_connected() -> None:
    async with Millpond("memory://") as pond:
        await asyncio.to_thread(pond.publish_sync, "orders", {"sku": 7})
        (claim,) = await (await pond.transport).claim(["orders"])
        assert claim.message.payload == b'{"sku":7}'
        pond.publish_sync("orders", {"sku": 8})
        (claim,) = await (await pond.transport).claim(["orders"])
        assert claim.message.payload == b'{"sku":8}'
        with pytest.raises(Unsupported, match="TRANSACTIONS"):
            pond.publish_sync("orders", 1, within=object())


async def test_a_pond_that_cannot_connect_tries_again(sqlite_url: str) -> None:
    pond = Millpond(sqlite_url, migrate=False)
    for _ in range(2):
        with pytest.raises(millpond.MillpondError, match="millpond migrate"):
            await pond.publish("orders", 1)
    await (await millpond.connect(sqlite_url)).close()
    await pond.publish("orders", 1)
    await pond.close()


def test_a_pond_may_be_used_by_one_event_loop_after_another(url: str) -> None:
    pond = Millpond(url)

    async def once() -> None:
        await pond.publish("orders", 1)
        await (await pond.transport).close()

    asyncio.run(once())
    asyncio.run(once())


async def test_the_seam(url: str) -> None:
    transport = await millpond.connect(url)
    published = await transport.publish([Message(queue="q", payload=b"...")])
    assert [(type(p.id), p.new) for p in published] == [(UUID, True)]
    claims = await transport.claim(["q"], limit=100, lease=30)
    (c,) = claims
    assert (c.message.payload, c.message.id, c.deliveries, c.attempts) == (b"...", published[0].id, 1, 0)
    refused = await transport.extend([c.receipt], lease=60)
    assert refused == []
    refused = await transport.settle([Ack(c.receipt) for c in claims])
    assert refused == []
    stale = Receipt(c.receipt.id, c.receipt.token + 1)
    assert await transport.settle([Ack(stale)]) == [stale]

    await transport.publish([Message(queue="q", payload=b"1") for _ in range(4)])
    a, b, c, d = await transport.claim(["q"], limit=4)
    assert await transport.settle([Nack(a.receipt, delay=60), Reject(b.receipt, "why"), GiveBack(c.receipt)]) == []
    async with transaction(url) as connection:
        await transport.settle([Ack(d.receipt)], within=connection)
    rows = await transport.operations.find([claim.receipt.id for claim in (a, b, c, d)])
    states = {row.id: row.state for row in rows}
    assert [states[claim.receipt.id] for claim in (a, b, c, d)] == [
        State.RETRYABLE,
        State.FAILED,
        State.PENDING,
        State.COMPLETED,
    ]
    await transport.close()
