"""Two tries of one publish at once: the first is cut off but still runs when the second begins."""

import asyncio
from contextlib import closing
from typing import Any
from uuid import uuid4

import asyncpg
import pymysql

import millpond
from millpond import Message
from tests.rooms.transactions.callers import address
from tests.waiting import IS_WAITING, mariadb_waits, until

# State after the first try: the message is written, but not committed.
WRITTEN = (
    "INSERT INTO millpond_message (id, queue, priority, due_at, state, payload, created_at) "
    "VALUES (%s, 'q', 50, 0, 'PENDING', 'x', 0)"
)


async def test_on_postgresql(postgres_url: str) -> None:
    store = await millpond.connect(postgres_url, migrate=True)
    twin = await asyncpg.connect(postgres_url)
    id_ = uuid4()
    await twin.execute("BEGIN")
    await twin.execute(WRITTEN.replace("%s", "$1"), id_)
    second = asyncio.create_task(store.publish([Message(queue="q", payload=b"x", id=id_)]))
    async with asyncio.timeout(60):
        while not await twin.fetchval(IS_WAITING):  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    await twin.execute("COMMIT")
    assert not (await second)[0].new
    assert len(await store.claim(["q"], limit=10)) == 1
    await twin.close()
    await store.close()


async def test_on_mariadb(mariadb_url: str) -> None:
    store = await millpond.connect(mariadb_url, migrate=True)
    id_ = uuid4()
    with closing(pymysql.connect(**address(mariadb_url))) as twin, twin.cursor() as cursor:
        cursor.execute(WRITTEN, [id_.bytes])

        def query(text: str) -> Any:
            cursor.execute(text)
            return cursor.fetchall()

        second = asyncio.create_task(store.publish([Message(queue="q", payload=b"x", id=id_)]))
        await until(lambda: mariadb_waits(query), "the second try")
        twin.commit()
        assert not (await second)[0].new
    assert len(await store.claim(["q"], limit=10)) == 1
    await store.close()
