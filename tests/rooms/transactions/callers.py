"""Callers of every kind: each has its connection, opened with its library."""

import sqlite3
from collections.abc import AsyncIterator, Callable, Collection
from contextlib import AbstractAsyncContextManager, asynccontextmanager, closing
from typing import Any
from urllib.parse import urlsplit

import aiosqlite
import asyncmy
import asyncpg
import django
import psycopg
import pymysql
import pytest
import sqlalchemy
from django.conf import settings as django_settings
from psycopg.rows import dict_row
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from sqlalchemy.orm import Session, scoped_session, sessionmaker


class CallerCalls:
    """The calls that a caller makes on its connection, synchronous or not."""

    def __init__(self, within: Any, *, execute: Callable, commit: Callable, rollback: Callable) -> None:
        self.within = within
        self._execute, self._commit, self._rollback = execute, commit, rollback

    async def execute(self, text: str) -> Any:
        return await now(self._execute(text))

    async def commit(self) -> None:
        await now(self._commit())

    async def rollback(self) -> None:
        await now(self._rollback())


async def now(value: Any) -> Any:
    return await value if hasattr(value, "__await__") else value


def each(execute: Callable[[str], Any], *texts: str) -> None:
    for text in texts:
        execute(text)


def address(url: str) -> dict[str, Any]:
    """A server URL as the keywords of the MySQL drivers."""
    parts = urlsplit(url)
    return {
        "host": parts.hostname,
        "port": parts.port,
        "user": parts.username,
        "password": parts.password,
        "database": parts.path[1:],
    }


def path(url: str) -> str:
    return url.removeprefix("sqlite:///")


def sqlalchemy_url(url: str, driver: str) -> str:
    return f"{url.partition('://')[0]}+{driver}://{url.partition('://')[2]}"


# --- drivers -------------------------------------------------------------------------------------------------


@asynccontextmanager
async def psycopg_sync(url: str) -> AsyncIterator[CallerCalls]:
    with psycopg.connect(url) as c:
        yield CallerCalls(c, execute=c.execute, commit=c.commit, rollback=c.rollback)


@asynccontextmanager
async def psycopg_dict_rows(url: str) -> AsyncIterator[CallerCalls]:
    """With settings of the caller that must not matter to the store."""
    with psycopg.connect(url, row_factory=dict_row, cursor_factory=psycopg.ClientCursor, prepare_threshold=None) as c:
        yield CallerCalls(c, execute=c.execute, commit=c.commit, rollback=c.rollback)


@asynccontextmanager
async def psycopg_in_autocommit(url: str) -> AsyncIterator[CallerCalls]:
    """Autocommit, with a transaction begun by calls."""
    with psycopg.connect(url, autocommit=True) as c:
        c.execute("BEGIN")
        yield CallerCalls(
            c,
            execute=c.execute,
            commit=lambda: each(c.execute, "COMMIT", "BEGIN"),
            rollback=lambda: each(c.execute, "ROLLBACK", "BEGIN"),
        )


@asynccontextmanager
async def psycopg_async(url: str) -> AsyncIterator[CallerCalls]:
    async with await psycopg.AsyncConnection.connect(url) as c:
        yield CallerCalls(c, execute=c.execute, commit=c.commit, rollback=c.rollback)


@asynccontextmanager
async def asyncpg_connection(url: str) -> AsyncIterator[CallerCalls]:
    c = await asyncpg.connect(url)
    try:
        async with _asyncpg_hand(c) as calls:
            yield calls
    finally:
        await c.close()


@asynccontextmanager
async def asyncpg_from_pool(url: str) -> AsyncIterator[CallerCalls]:
    async with asyncpg.create_pool(url, min_size=1, max_size=1) as pool, pool.acquire() as c, _asyncpg_hand(c) as calls:
        yield calls


@asynccontextmanager
async def _asyncpg_hand(c: Any) -> AsyncIterator[CallerCalls]:
    await c.execute("BEGIN")

    async def end(word: str) -> None:
        await c.execute(word)
        await c.execute("BEGIN")

    yield CallerCalls(c, execute=c.execute, commit=lambda: end("COMMIT"), rollback=lambda: end("ROLLBACK"))
    await c.execute("ROLLBACK")


@asynccontextmanager
async def sqlite3_legacy(url: str) -> AsyncIterator[CallerCalls]:
    """The default of the module: the first write begins a transaction."""
    with closing(sqlite3.connect(path(url))) as c:
        yield CallerCalls(c, execute=c.execute, commit=c.commit, rollback=c.rollback)


@asynccontextmanager
async def sqlite3_by_hand(url: str) -> AsyncIterator[CallerCalls]:
    with closing(sqlite3.connect(path(url), isolation_level=None)) as c:
        c.row_factory = lambda cursor, row: {d[0]: value for d, value in zip(cursor.description, row, strict=True)}
        c.execute("BEGIN IMMEDIATE")
        yield CallerCalls(
            c,
            execute=c.execute,
            commit=lambda: each(c.execute, "COMMIT", "BEGIN IMMEDIATE"),
            rollback=lambda: each(c.execute, "ROLLBACK", "BEGIN IMMEDIATE"),
        )
        c.execute("ROLLBACK")


@asynccontextmanager
async def aiosqlite_connection(url: str) -> AsyncIterator[CallerCalls]:
    async with aiosqlite.connect(path(url)) as c:
        yield CallerCalls(c, execute=c.execute, commit=c.commit, rollback=c.rollback)


@asynccontextmanager
async def pymysql_connection(url: str) -> AsyncIterator[CallerCalls]:
    with closing(pymysql.connect(**address(url), cursorclass=pymysql.cursors.DictCursor)) as c:

        def execute(text: str) -> None:
            with c.cursor() as cursor:
                cursor.execute(text)

        yield CallerCalls(c, execute=execute, commit=c.commit, rollback=c.rollback)


@asynccontextmanager
async def asyncmy_connection(url: str) -> AsyncIterator[CallerCalls]:
    c = await asyncmy.connect(**address(url))

    async def execute(text: str) -> None:
        async with c.cursor() as cursor:
            await cursor.execute(text)

    try:
        yield CallerCalls(c, execute=execute, commit=c.commit, rollback=c.rollback)
    finally:
        await c.ensure_closed()


# --- SQLAlchemy ----------------------------------------------------------------------------------------------


def sa_connection(driver: str) -> Callable[[str], AbstractAsyncContextManager[CallerCalls]]:
    @asynccontextmanager
    async def opened(url: str) -> AsyncIterator[CallerCalls]:
        engine = sqlalchemy.create_engine(sqlalchemy_url(url, driver))
        with engine.connect() as c:
            yield CallerCalls(
                c, execute=lambda t: c.execute(sqlalchemy.text(t)) and None, commit=c.commit, rollback=c.rollback
            )
        engine.dispose()

    return opened


def sa_session(driver: str) -> Callable[[str], AbstractAsyncContextManager[CallerCalls]]:
    @asynccontextmanager
    async def opened(url: str) -> AsyncIterator[CallerCalls]:
        engine = sqlalchemy.create_engine(sqlalchemy_url(url, driver))
        with Session(engine) as s:
            yield CallerCalls(
                s, execute=lambda t: s.execute(sqlalchemy.text(t)) and None, commit=s.commit, rollback=s.rollback
            )
        engine.dispose()

    return opened


@asynccontextmanager
async def sa_scoped_session(url: str) -> AsyncIterator[CallerCalls]:
    engine = sqlalchemy.create_engine(sqlalchemy_url(url, "psycopg"))
    s = scoped_session(sessionmaker(engine))
    yield CallerCalls(s, execute=lambda t: s.execute(sqlalchemy.text(t)) and None, commit=s.commit, rollback=s.rollback)
    s.remove()
    engine.dispose()


def sa_async_connection(driver: str) -> Callable[[str], AbstractAsyncContextManager[CallerCalls]]:
    @asynccontextmanager
    async def opened(url: str) -> AsyncIterator[CallerCalls]:
        engine = create_async_engine(sqlalchemy_url(url, driver))
        try:
            async with engine.connect() as c:
                yield CallerCalls(
                    c, execute=lambda t: c.execute(sqlalchemy.text(t)), commit=c.commit, rollback=c.rollback
                )
        finally:
            await engine.dispose()

    return opened


def sa_async_session(driver: str) -> Callable[[str], AbstractAsyncContextManager[CallerCalls]]:
    @asynccontextmanager
    async def opened(url: str) -> AsyncIterator[CallerCalls]:
        engine = create_async_engine(sqlalchemy_url(url, driver))
        try:
            async with AsyncSession(engine) as s:
                yield CallerCalls(
                    s, execute=lambda t: s.execute(sqlalchemy.text(t)), commit=s.commit, rollback=s.rollback
                )
        finally:
            await engine.dispose()

    return opened


# --- Django --------------------------------------------------------------------------------------------------


def django_connection(vendor: str) -> Callable[[str], AbstractAsyncContextManager[CallerCalls]]:
    @asynccontextmanager
    async def opened(url: str) -> AsyncIterator[CallerCalls]:
        with django_on(vendor, url):
            from django.db import connection, transaction

            def end(rollback: bool) -> None:
                transaction.set_rollback(rollback)
                atomic[-1].__exit__(None, None, None)
                atomic[-1] = transaction.atomic()
                atomic[-1].__enter__()

            def execute(text: str) -> None:
                with connection.cursor() as cursor:
                    cursor.execute(text)

            # Tests run in the thread of an event loop, where Django refuses to block.
            atomic = [transaction.atomic()]
            atomic[-1].__enter__()
            yield CallerCalls(connection, execute=execute, commit=lambda: end(False), rollback=lambda: end(True))
            transaction.set_rollback(True)
            atomic[-1].__exit__(None, None, None)

    return opened


class django_on:
    """Point Django's default connection at a test's database."""

    def __init__(self, vendor: str, url: str) -> None:
        if vendor == "sqlite":
            self._database = {"ENGINE": "django.db.backends.sqlite3", "NAME": path(url)}
        else:
            at = address(url)
            self._database = {
                "ENGINE": "django.db.backends.postgresql",
                "NAME": at["database"],
                "HOST": at["host"],
                "PORT": at["port"],
                "USER": at["user"],
                "PASSWORD": at["password"],
            }

    def __enter__(self) -> None:
        if not django_settings.configured:
            django_settings.configure(DATABASES={"default": {}}, USE_TZ=True)
            django.setup()
        from django.db import connections

        connections.settings = connections.configure_settings({"default": self._database})
        if hasattr(connections._connections, "default"):
            del connections["default"]

    def __exit__(self, *_: object) -> None:
        from django.db import connections

        connections["default"].close()
        del connections["default"]


Open = Callable[[str], AbstractAsyncContextManager[CallerCalls]]


def params(callers: dict[str, tuple[str, Open]], some: Collection[str] = (), mark: Any = None) -> list[Any]:
    """The names, marked where the caller's database is on a server; `some` of them with a further mark."""
    found = []
    for name, (database, _) in callers.items():
        marks = [] if database == "sqlite" else [pytest.mark.server]
        found.append(pytest.param(name, marks=[*marks, mark] if name in some else marks))
    return found


SYNC: dict[str, tuple[str, Open]] = {
    "psycopg": ("postgres", psycopg_sync),
    "psycopg, dict rows": ("postgres", psycopg_dict_rows),
    "psycopg, autocommit": ("postgres", psycopg_in_autocommit),
    "sqlite3": ("sqlite", sqlite3_legacy),
    "sqlite3, by calls": ("sqlite", sqlite3_by_hand),
    "PyMySQL": ("mariadb", pymysql_connection),
    "Connection, psycopg": ("postgres", sa_connection("psycopg")),
    "Connection, pysqlite": ("sqlite", sa_connection("pysqlite")),
    "Connection, pymysql": ("mariadb", sa_connection("pymysql")),
    "Session, psycopg": ("postgres", sa_session("psycopg")),
    "Session, pysqlite": ("sqlite", sa_session("pysqlite")),
    "Session, pymysql": ("mariadb", sa_session("pymysql")),
    "scoped_session": ("postgres", sa_scoped_session),
    "Django, sqlite": ("sqlite", django_connection("sqlite")),
    "Django, postgresql": ("postgres", django_connection("postgresql")),
}
ASYNC: dict[str, tuple[str, Open]] = {
    "psycopg, async": ("postgres", psycopg_async),
    "asyncpg": ("postgres", asyncpg_connection),
    "asyncpg, from a pool": ("postgres", asyncpg_from_pool),
    "aiosqlite": ("sqlite", aiosqlite_connection),
    "asyncmy": ("mariadb", asyncmy_connection),
    "AsyncConnection, psycopg": ("postgres", sa_async_connection("psycopg")),
    "AsyncConnection, asyncpg": ("postgres", sa_async_connection("asyncpg")),
    "AsyncConnection, aiosqlite": ("sqlite", sa_async_connection("aiosqlite")),
    "AsyncConnection, asyncmy": ("mariadb", sa_async_connection("asyncmy")),
    "AsyncSession, psycopg": ("postgres", sa_async_session("psycopg")),
    "AsyncSession, asyncpg": ("postgres", sa_async_session("asyncpg")),
    "AsyncSession, aiosqlite": ("sqlite", sa_async_session("aiosqlite")),
    "AsyncSession, asyncmy": ("mariadb", sa_async_session("asyncmy")),
}
REPEATED = (
    *("psycopg, dict rows", "scoped_session", "asyncpg, from a pool"),
    *(name for name in (*SYNC, *ASYNC) if name.startswith(("Connection", "AsyncConnection"))),
)
"""Callers whose connection is that of another one, wrapped or with other settings."""
