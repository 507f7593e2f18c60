"""One kind of caller with the verbs that it calls, and a second connection to its database."""

import asyncio
import sqlite3
from collections.abc import Callable, Coroutine, Sequence
from contextlib import closing
from typing import Any

import psycopg
import pymysql

import millpond
from millpond import Message
from millpond.transports import transactions
from tests.rooms.transactions.callers import CallerCalls, Open, address, path


class Caller:
    """One kind of caller, its database, and a second connection to that database."""

    def __init__(self, url: str, opened: Open, *, sync: bool) -> None:
        self.url = url
        self.open = opened
        self.sync = sync
        with_store(url, lambda store: nothing(), migrate=True)
        self.rows_of("CREATE TABLE IF NOT EXISTS orders (id INTEGER)")

    def run(self, body: Callable[[CallerCalls, "Verbs"], Coroutine[Any, Any, None]]) -> None:
        """Run a test's body with this caller's connection."""

        async def whole() -> None:
            async with self.open(self.url) as calls:
                if self.sync:
                    await body(calls, Verbs(None, transactions(self.url)))
                    return
                store = await millpond.connect(self.url)
                try:
                    await body(calls, Verbs(store, None))
                finally:
                    await store.close()

        if self.sync:
            without_loop(whole())
        else:
            asyncio.run(whole())

    def rows_of(self, text: str) -> list[tuple[Any, ...]]:
        scheme = self.url.partition(":")[0]
        if scheme == "sqlite":
            with closing(sqlite3.connect(path(self.url), isolation_level=None)) as c:
                return c.execute(text).fetchall()
        if scheme == "mysql":
            with closing(pymysql.connect(**address(self.url), autocommit=True)) as c, c.cursor() as cursor:
                cursor.execute(text)
                return list(cursor.fetchall())
        with psycopg.connect(self.url, autocommit=True) as c:
            cursor = c.execute(text)
            return cursor.fetchall() if cursor.description else []

    def orders(self) -> int:
        return int(self.rows_of("SELECT count(*) FROM orders")[0][0])

    def states(self) -> list[str]:
        """States of all messages, live and archived, by queue name."""
        rows = self.rows_of(
            "SELECT queue, state FROM millpond_message UNION ALL SELECT queue, state FROM millpond_archive"
        )
        return [state for _, state in sorted(rows)]

    def claimed(self, *queues: str) -> list[millpond.Claim]:
        """One message of each queue, published and claimed."""

        async def claim(store: Any) -> list[millpond.Claim]:
            await store.publish([Message(queue=queue, payload=b"%s") for queue in queues])
            return [(await store.claim([queue]))[0] for queue in queues]

        return with_store(self.url, claim)

    def settle(self, *outcomes: millpond.Outcome) -> list[millpond.Receipt]:
        return with_store(self.url, lambda store: store.settle(outcomes))


class Verbs:
    """The verbs of a store, or of a transactions room that never connects."""

    def __init__(self, store: Any, room: Any) -> None:
        self.store = store
        self._room = room

    async def publish(self, messages: Sequence[Message], within: Any) -> list[millpond.Published]:
        if self._room is not None:
            return self._room.publish_sync(messages, within=within)
        return await self.store.publish(messages, within=within)

    async def settle(self, outcomes: Sequence[millpond.Outcome], within: Any) -> list[millpond.Receipt]:
        if self._room is not None:
            return self._room.settle_sync(outcomes, within=within)
        return await self.store.settle(outcomes, within=within)


def without_loop(coroutine: Coroutine[Any, Any, None]) -> None:
    try:
        coroutine.send(None)
    except StopIteration:
        return
    raise AssertionError("something waited")


def with_store(url: str, work: Callable[[Any], Coroutine[Any, Any, Any]], **options: Any) -> Any:
    async def whole() -> Any:
        store = await millpond.connect(url, **options)
        try:
            return await work(store)
        finally:
            await store.close()

    return asyncio.run(whole())


async def nothing() -> None: ...
