"""A worker of many shards: its connections and its idle statements do not grow with their number."""

from __future__ import annotations

import asyncio
import os
import shutil
import sqlite3
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, NamedTuple

import psycopg
import pytest

import millpond
from millpond import Message, Millpond, State, transports
from millpond.clock import monotonic
from millpond.transports.database.postgres import engine
from millpond.transports.database.sql.statement import Statement
from millpond.transports.shard_map import ShardMap, ShardRecord
from millpond.transports.sharded import members, shard
from tests import templates
from tests.waiting import until

AT_ONCE = 4
IDLE = 1.5
"""Seconds for which statements are counted."""


class Figures(NamedTuple):
    """An idle worker: the largest number of its connections, and its statements in a second."""

    connections: int
    statements: float


async def files(folder: Path, count: int) -> list[str]:
    """URLs of SQLite files that form one pond."""
    folder.mkdir(exist_ok=True)
    first = folder / "s0-shard.db"
    store: Any = await millpond.connect(templates.migrated(first))
    names = [f"s{n}" for n in range(count)]
    await store.shards.enter(ShardRecord("s0", ShardMap.even("pond", names)))
    await store.close()
    paths = [folder / f"{name}-shard.db" for name in names]
    for name, path in zip(names[1:], paths[1:], strict=True):
        shutil.copyfile(first, path)
        with sqlite3.connect(path) as connection:
            connection.execute("UPDATE millpond_shard SET name = ?", [name])
        connection.close()
    return [f"sqlite:///{path}" for path in paths]


def open_files() -> int:
    """Connections of this process to SQLite files of shards."""
    found = 0
    for fd in os.listdir("/proc/self/fd"):
        try:
            found += os.readlink(f"/proc/self/fd/{fd}").endswith("-shard.db")
        except FileNotFoundError:
            continue
    return found


async def schemas(url: str, count: int) -> list[str]:
    """URLs of schemas of one PostgreSQL database that form one pond."""
    with psycopg.connect(url) as connection:
        for n in range(count):
            connection.execute(f"CREATE SCHEMA s{n}")
    urls = [f"{url}?search_path=s{n}" for n in range(count)]
    await transports.init_shards(urls, migrate=True)
    return urls


def sessions(url: str) -> int:
    with psycopg.connect(url) as connection:
        row = connection.execute(
            "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND pid <> pg_backend_pid()"
        ).fetchone()
        return int(row[0]) if row else 0


@asynccontextmanager
async def working(urls: list[str]) -> AsyncIterator[tuple[Millpond, list[int]]]:
    """A worker of one process, and the bodies that it handled."""
    pond, done = Millpond(urls), list[int]()

    @pond.subscriber("q", max_workers=4)
    async def handle(body: int) -> None:
        done.append(body)

    ended = asyncio.create_task(pond.run())
    transport = await pond.transport
    await until(transport.workers.status, "the worker")
    try:
        yield pond, done
    finally:
        pond.stop()
        await ended
        await pond.close()


async def idle(
    urls: list[str], connections: Callable[[], int], monkeypatch: pytest.MonkeyPatch, limit: int | None = None
) -> Figures:
    """`limit`: measure again until no more connections are open. At its start a worker checks at every shard."""
    count, render = [0], Statement.render

    def counted(self: Statement, *args: Any) -> Any:
        count[0] += 1
        return render(self, *args)

    async def measure() -> Figures:
        began, most, count[0] = monotonic(), 0, 0
        while monotonic() - began < IDLE:
            most = max(most, await asyncio.to_thread(connections))
            await asyncio.sleep(0.1)
        return Figures(most, count[0] / (monotonic() - began))

    async def measure_idle() -> Figures | None:
        figures = await measure()
        return figures if limit is None or figures.connections <= limit else None

    async with working(urls):
        with monkeypatch.context() as patch:
            patch.setattr(Statement, "render", counted)
            figures: Figures = await until(measure_idle, f"at most {limit} connections")
            return figures


async def handles_all(urls: list[str], count: int) -> None:
    """Messages of every shard are handled, wherever the worker has its attention."""
    async with working(urls) as (pond, done):
        await pond.publish_many("q", list(range(count)))
        await until(lambda: len(done) == count, "all messages")
        assert sorted(done) == list(range(count))


@pytest.fixture
def few_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(members, "AT_ONCE", AT_ONCE)


@pytest.mark.usefixtures("few_at_once")
async def test_an_idle_worker_on_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    few = await idle(await files(tmp_path / "few", AT_ONCE), open_files, monkeypatch)
    many = await idle(await files(tmp_path / "many", 24), open_files, monkeypatch, few.connections + 2 * AT_ONCE)
    assert many.statements <= 2 * few.statements + 60, (few, many)


@pytest.mark.usefixtures("few_at_once")
async def test_messages_of_all_files_are_handled(tmp_path: Path) -> None:
    await handles_all(await files(tmp_path, 6), 30)


@pytest.mark.usefixtures("few_at_once")
async def test_brief_calls_keep_no_connection_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two at once neither closes the connection: it is closed later, however often it is used briefly."""
    monkeypatch.setattr(shard, "_UNUSED", 0.2)
    store: Any = await millpond.connect(await files(tmp_path, AT_ONCE + 2))
    member = store.members["s0"]
    await member.rest()

    async def wait(inner: Any) -> None:
        await asyncio.sleep(0.1)

    first = asyncio.create_task(members.briefly(member, wait, within=None))
    await until(lambda: member.store is not None)
    await asyncio.gather(first, members.briefly(member, wait, within=None))
    assert member.store is not None

    async def is_closed() -> bool:
        await members.briefly(member, lambda inner: inner.shards.record(), within=None)
        return member.store is None

    await until(is_closed, "the end of the connection", every=0.02)
    await store.close()


async def test_a_running_program_goes_on_when_a_shard_joins(tmp_path: Path) -> None:
    """Its connections were closed when they were not used. Those that it opens anew show a newer map."""
    urls = await files(tmp_path, members.AT_ONCE + 1)
    store: Any = await millpond.connect(urls)
    try:
        await transports.add_shard([*urls, templates.migrated(tmp_path / "new-shard.db")], "new")
        await store.publish([Message(queue="q", payload=b"%d" % n) for n in range(100)])
        (stats,) = await store.operations.count(["q"])
        assert stats.counts[State.PENDING] == 100 and stats.missing == ("new",)
    finally:
        await store.close()


@pytest.mark.slow
@pytest.mark.usefixtures("few_at_once")
async def test_an_idle_worker_on_postgres(postgres_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # At its start a pool may have more connections. They are closed when they were idle for a while.
    monkeypatch.setattr(engine, "_IDLE", 2.0)
    urls = await schemas(postgres_url, 16)
    # Of each attended shard: two of the pool, one that listens, one that beats, one of the heartbeat's thread.
    limit = 5 * AT_ONCE + 4
    await idle(urls, lambda: sessions(postgres_url), monkeypatch, limit)
    await handles_all(urls, 100)


@pytest.mark.slow
@pytest.mark.parametrize("count", [64, pytest.param(256, marks=pytest.mark.long)])
async def test_an_idle_worker_on_many_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    """With each shard attended, connections and statements would grow with the number of files."""
    few = await idle(await files(tmp_path / "few", 16), open_files, monkeypatch)
    many = await idle(await files(tmp_path / "many", count), open_files, monkeypatch, few.connections + 32)
    assert many.statements <= 2 * few.statements + 60, (few, many)
