"""Each finding of the doctor, staged on a real database."""

from __future__ import annotations

import sqlite3
from collections.abc import AsyncIterator
from functools import partial
from typing import Any

import asyncpg
import pytest

import millpond
from millpond import GiveBack, ManualClock, Message, Transport
from millpond.control import Control, doctor
from millpond.seam.diagnosis import Finding
from millpond.transports.database.mysql import examine as mysql
from millpond.transports.database.postgres import examine as postgres
from tests.control.held import held_transaction
from tests.shared import KINDS, empty_database
from tests.waiting import until


@pytest.fixture(params=KINDS)
def url(request: pytest.FixtureRequest) -> str:
    return empty_database(request, request.param)


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
async def store(url: str, clock: ManualClock) -> AsyncIterator[Transport]:
    store = await millpond.connect(url, migrate=True, clock=clock)
    yield store
    await store.close()


async def kinds(store: Transport) -> set[str]:
    """Kinds of findings that a test has staged."""
    found = {finding.kind for finding in await Control(store).doctor()}
    return found - {"old-sqlite", "missing-partitions"}


async def test_a_quiet_queue_has_no_finding(store: Transport, url: str) -> None:
    await store.publish([Message(queue="q", payload=b"1")])
    assert await kinds(store) == set()
    if url.startswith("sqlite"):
        found = {finding.kind for finding in await Control(store).doctor()}
        assert ("old-sqlite" in found) is (sqlite3.sqlite_version_info < (3, 51, 3))


async def test_no_retention(store: Transport, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "MANY_ARCHIVED", 1)
    await store.publish([Message(queue="q", payload=b"1")])
    (claim,) = await store.claim(["q"])
    await store.settle([millpond.Ack(claim.receipt)])
    assert await kinds(store) == {"no-retention"}
    await store.operations.retain("q", completed=60, failed=None)
    assert await kinds(store) == set()


async def test_a_silent_worker_and_an_undriven_stream(store: Transport, clock: ManualClock) -> None:
    await store.publish([Message(queue="q", payload=b"1"), Message(queue="r", payload=b"1")])
    worker = await store.workers.join("mill", queues=["q"])
    await store.claim(["q"], 1, by_worker=True)
    epoch, seq = await store.streams.open("nightly")
    await store.streams.claim("nightly", epoch, seq + 1, ["r"], 10)
    assert await kinds(store) == set()
    clock.advance(3600)
    findings = await Control(store).doctor()
    assert {"silent-worker", "undriven-stream"} <= {finding.kind for finding in findings}
    assert findings[0].severity == "error" and all(finding.remedy for finding in findings)
    await worker.leave()


async def test_a_lease_that_is_too_short(store: Transport) -> None:
    await store.publish([Message(queue="q", payload=b"1")])
    for _ in range(5):
        (claim,) = await store.claim(["q"])
        await store.settle([GiveBack(claim.receipt, delivered=True)])
    assert await kinds(store) == {"short-lease"}


async def held(control: Control) -> list[Finding]:
    return [found for found in await control.doctor() if found.kind == "held-transaction"]


@pytest.mark.server
async def test_a_held_transaction(shared_postgres: Any, shared_mariadb: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(postgres, "HELD_FOR", 0.0)
    monkeypatch.setattr(mysql, "HELD_FOR", -5)
    for shared in (shared_postgres, shared_mariadb):
        store = await millpond.connect(shared.url)
        await store.publish([Message(queue="q", payload=b"1")])
        async with held_transaction(shared.url):
            # MariaDB shows a list of transactions that is up to 0.1 s old if another session has just read it.
            (finding, *_) = await until(partial(held, Control(store)), "the held transaction")
            assert finding.severity == "error"
        await store.close()


@pytest.mark.server
@pytest.mark.parametrize("kind", ["postgres", "mariadb"])
async def test_dead_rows(kind: str, shared_postgres: Any, shared_mariadb: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(postgres, "_DEAD", 50)
    monkeypatch.setattr(mysql, "_HISTORY", 50)
    shared = shared_postgres if kind == "postgres" else shared_mariadb
    shared.empty()
    store = await millpond.connect(shared.url)

    async def found() -> bool:
        return "dead-rows" in {finding.kind for finding in await store.diagnosis.examine()}

    await store.publish([Message(queue="q", payload=b"1")])
    async with held_transaction(shared.url, snapshot=True):  # it keeps them from being removed
        for _ in range(60):
            await store.publish([Message(queue="q", payload=b"1")])
            await store.settle([millpond.Ack(claim.receipt) for claim in await store.claim(["q"], 10)])
        await until(found, "the dead rows")  # PostgreSQL counts them about once a second
    await store.close()


@pytest.mark.server
async def test_missing_partitions(postgres_url: str) -> None:
    store = await millpond.connect(postgres_url, migrate=True)

    async def missing() -> list[str]:
        return [one.text for one in await Control(store).doctor() if one.kind == "missing-partitions"]

    assert await missing() == []
    connection = await asyncpg.connect(postgres_url)
    names = await connection.fetch(
        "SELECT inhrelid::regclass::text AS name FROM pg_inherits WHERE inhparent = 'millpond_archive'::regclass "
        "AND pg_get_expr((SELECT relpartbound FROM pg_class WHERE oid = inhrelid), inhrelid) <> 'DEFAULT' ORDER BY 1"
    )
    await connection.execute(f"DROP TABLE {names[-1]['name']}, {names[-2]['name']}")
    await connection.close()
    assert [text.split()[0] for text in await missing()] == ["2"]
    await store.operations.purge()
    assert await missing() == []
    await store.close()


async def test_clocks_that_differ(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    import time

    from millpond.transports.database.diagnosis import diagnosis

    store = await millpond.connect(url, migrate=True)
    assert "clocks" not in {finding.kind for finding in await Control(store).doctor()}

    class Late:
        @staticmethod
        def time() -> float:
            return time.time() - 3600

    monkeypatch.setattr(diagnosis, "time", Late)
    assert "clocks" in {finding.kind for finding in await Control(store).doctor()}
    await store.close()


async def test_sessions_that_change(store: Transport) -> None:
    worker = await store.workers.join("mill", queues=["q"])
    worker._by_lock = False  # type: ignore[attr-defined]
    await worker.beat()
    assert "pooler" in await kinds(store)
    await worker.leave()
