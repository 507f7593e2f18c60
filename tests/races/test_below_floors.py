"""Messages that appear before the place where a busy consumer claims, while another transaction holds its snapshot.

The consumer has a backlog: each of its claims is full, so only its reads below the floors can find the message.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterator
from datetime import timedelta
from typing import Any
from uuid import UUID, uuid4

import psycopg
import pytest

import millpond
from millpond import Ack, Claim, GiveBack, Message
from millpond.transports.database.sql.statement import Query, Statement, Steps
from tests.races.processes import report
from tests.triggers import execute

pytestmark = pytest.mark.slow

BACKLOG = 20_000
BATCH = 10
WITHIN = 15.0
"""Seconds; about one on a quiet machine, and without a read the time until the backlog is gone."""
PAUSE = 0.004
"""Seconds between two claims: the backlog lasts for eight seconds on the quickest machine."""
DEAD = 100_000
COLUMNS = "id, queue, priority, due_at, state, payload, created_at"
INSERT = f"INSERT INTO millpond_message ({COLUMNS}) SELECT"
NOW = "(extract(epoch FROM clock_timestamp()) * 1000000)::bigint"


@pytest.fixture
async def stores(postgres_url: str) -> AsyncIterator[tuple[Any, Any]]:
    """The consumer, and a store of another process."""
    consumer = await millpond.connect(postgres_url, migrate=True, notify=False)
    other = await millpond.connect(postgres_url, notify=False)
    yield consumer, other
    await consumer.close()
    await other.close()


@pytest.fixture
def held(postgres_url: str, stores: Any) -> Iterator[None]:
    """A transaction that keeps its snapshot: no dead row can be removed."""
    with psycopg.connect(postgres_url) as connection:
        connection.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
        connection.execute("SELECT count(*) FROM millpond_message")
        yield


def fill(url: str, count: int) -> None:
    """A backlog, each message due a little later than the one before it; the last one is due now."""
    execute(
        url,
        f"{INSERT} gen_random_uuid(), 'q', 50, {NOW} - {count} * 100 + n * 100, 'PENDING', '', {NOW} "
        f"FROM generate_series(1, {count}) n",
    )


async def drain(store: Any, claims: int, batch: int = BATCH) -> list[Claim]:
    """Claim full batches and ack them; returns the last."""
    last: list[Claim] = []
    for _ in range(claims):
        last = await store.claim(["q"], limit=batch)
        assert len(last) == batch
        await store.settle([Ack(claim.receipt) for claim in last])
    return last


async def until_claimed(store: Any, id_: UUID) -> float:
    """Seconds until a consumer whose claims are full gets a message."""
    began = time.monotonic()
    while True:
        claims = await store.claim(["q"], limit=BATCH)
        assert len(claims) == BATCH, "the backlog was gone first"
        await store.settle([Ack(claim.receipt) for claim in claims])
        if any(claim.receipt.id == id_ for claim in claims):
            return time.monotonic() - began
        await asyncio.sleep(PAUSE)


async def late_commit(url: str, other: Any, consumer: Any) -> UUID:
    with psycopg.connect(url) as caller:
        (late,) = other.transactions.publish_sync([Message(queue="q", payload=b"late")], within=caller)
        fill(url, BACKLOG)
        execute(url, f"UPDATE millpond_message SET due_at = {NOW} WHERE due_at < {NOW}")  # later than the late one
        await drain(consumer, 20)
        caller.commit()
    return late.id  # type: ignore[no-any-return]


async def late_insert_with_the_time_of_its_transaction(url: str, other: Any, consumer: Any) -> UUID:
    id_ = uuid4()
    with psycopg.connect(url) as caller:
        caller.execute("SELECT 1")
        fill(url, BACKLOG)
        await drain(consumer, 20)
        started = "(extract(epoch FROM now()) * 1000000)::bigint - 3600000000"
        caller.execute(f"{INSERT} '{id_}', 'q', 50, {started}, 'PENDING', '', {started}")
    return id_


async def give_back(url: str, other: Any, consumer: Any) -> UUID:
    fill(url, BACKLOG)
    (claim,) = await other.claim(["q"])
    await drain(consumer, 20)
    await other.settle([GiveBack(claim.receipt)])
    return claim.receipt.id  # type: ignore[no-any-return]


async def reap(url: str, other: Any, consumer: Any) -> UUID:
    fill(url, BACKLOG)
    (claim,) = await other.claim(["q"], lease=3600)
    await drain(consumer, 20)
    execute(url, "UPDATE millpond_message SET lease_until = 1 WHERE state = 'PROCESSING'")
    assert await other.workers.reap() == 1
    return claim.receipt.id  # type: ignore[no-any-return]


async def reschedule(url: str, other: Any, consumer: Any) -> UUID:
    (waiting,) = await other.publish([Message(queue="q", payload=b"", delay=timedelta(hours=1))])
    fill(url, BACKLOG)
    await drain(consumer, 20)
    await other.operations.reschedule([waiting.id], due_at=millpond.clock.as_datetime(1))
    return waiting.id  # type: ignore[no-any-return]


async def update_of_due_at(url: str, other: Any, consumer: Any) -> UUID:
    (waiting,) = await other.publish([Message(queue="q", payload=b"", delay=timedelta(hours=1))])
    fill(url, BACKLOG)
    await drain(consumer, 20)
    execute(url, f"UPDATE millpond_message SET due_at = 1 WHERE id = '{waiting.id}'")
    return waiting.id  # type: ignore[no-any-return]


async def update_of_priority(url: str, other: Any, consumer: Any) -> UUID:
    fill(url, BACKLOG)
    ((last,),) = execute(url, "SELECT id FROM millpond_message ORDER BY due_at DESC LIMIT 1")
    await drain(consumer, 20)
    execute(url, f"UPDATE millpond_message SET priority = 7 WHERE id = '{last}'")
    return UUID(str(last))


async def lock_without_a_change(url: str, other: Any, consumer: Any) -> UUID:
    fill(url, BACKLOG)
    with psycopg.connect(url) as caller:
        ((first,),) = caller.execute("SELECT id FROM millpond_message ORDER BY due_at LIMIT 1 FOR UPDATE").fetchall()
        await drain(consumer, 20)
    return UUID(str(first))


async def claim_that_is_rolled_back(url: str, other: Any, consumer: Any) -> UUID:
    fill(url, BACKLOG)
    with psycopg.connect(url) as caller:
        first = "(SELECT id FROM millpond_message ORDER BY due_at LIMIT 1)"
        ((id_,),) = caller.execute(
            f"UPDATE millpond_message SET state = 'PROCESSING' WHERE id = {first} RETURNING id"
        ).fetchall()
        await drain(consumer, 20)
        caller.rollback()
    return UUID(str(id_))


@pytest.mark.usefixtures("held")
@pytest.mark.parametrize(
    "appears",
    [
        late_commit,
        late_insert_with_the_time_of_its_transaction,
        give_back,
        reap,
        reschedule,
        update_of_due_at,
        update_of_priority,
        lock_without_a_change,
        claim_that_is_rolled_back,
    ],
)
async def test_it_is_found(postgres_url: str, stores: tuple[Any, Any], appears: Callable[..., Any]) -> None:
    consumer, other = stores
    seconds = await until_claimed(consumer, await appears(postgres_url, other, consumer))
    report(f"below a floor: {appears.__name__}", postgres_url, messages=BACKLOG, faults=1, seconds=round(seconds, 2))
    assert seconds < WITHIN


@pytest.mark.usefixtures("held")
async def test_a_locked_row_is_kept_until_it_is_free(postgres_url: str, stores: tuple[Any, Any]) -> None:
    consumer, _ = stores
    fill(postgres_url, BACKLOG)
    with psycopg.connect(postgres_url) as caller:
        ((first,),) = caller.execute("SELECT id FROM millpond_message ORDER BY due_at LIMIT 1 FOR UPDATE").fetchall()
        for _ in range(4):  # as many reads find it, and cannot claim it
            await drain(consumer, 10)
            for lanes in consumer.hints.lanes.values():
                lanes._read_at = -10.0
                lanes._passed._since = -10.0
    assert await until_claimed(consumer, UUID(str(first))) < WITHIN


async def test_more_messages_than_a_look_returns(postgres_url: str, stores: tuple[Any, Any]) -> None:
    consumer, other = stores
    fill(postgres_url, 3_000)
    claims = await other.claim(["q"], limit=2_500)
    await drain(consumer, 20)
    await other.settle([GiveBack(claim.receipt) for claim in claims])
    found: list[UUID] = []
    while batch := await consumer.claim(["q"], limit=100):
        found += [claim.receipt.id for claim in batch]
    assert len(found) == len(set(found)) == 3_000 - 200


async def test_rows_with_marks_of_another_server(postgres_url: str, stores: tuple[Any, Any]) -> None:
    """Restored or replicated rows; nothing else shows them."""
    consumer, _ = stores
    fill(postgres_url, 2_000)
    await drain(consumer, 20)
    execute(
        postgres_url,
        f"INSERT INTO millpond_message ({COLUMNS}, written) "
        "SELECT gen_random_uuid(), 'q', p, 1000000, 'PENDING', '', 0, '3' "
        "FROM unnest(ARRAY[50, 60]) p",
    )
    (lanes,) = consumer.hints.lanes.values()
    seen: set[int] = set()
    for _ in range(300):  # each claim reads a part
        lanes._sweep._next = 0.0
        lanes._took = 60.0  # on a busy machine every part takes long, and the next one would be smaller
        lanes.fall()
        for claim in await consumer.claim(["q"], limit=1):
            seen.add(claim.due_us)
        if 1_000_000 in seen:
            break
    assert 1_000_000 in seen


class Entries:
    """Counts the index entries that a store's claims read, dead ones too."""

    def __init__(self, url: str, store: Any) -> None:
        self._url = url
        self._store = store

    async def read(self) -> int:
        """Entries of the indexes of claims, since the server was started."""

        def flush() -> Steps[None]:
            yield Query(Statement("SELECT pg_stat_force_next_flush()"), {})

        await self._store.runner.read(flush)
        text = "SELECT sum(idx_tup_read) FROM pg_stat_user_indexes WHERE indexrelname IN (%s)"
        names = ", ".join(f"'millpond_message_{name}'" for name in ("claim", "appeared", "lease"))
        return int(execute(self._url, text % names)[0][0])


@pytest.mark.usefixtures("held")
async def test_entries_per_claim_do_not_grow_with_dead_rows(postgres_url: str) -> None:
    claims = 40
    store: Any = await millpond.connect(postgres_url, pool_size=2)
    entries = Entries(postgres_url, store)

    async def per_claim() -> float:
        before = await entries.read()
        for _ in range(claims):
            await store.publish([Message(queue="q", payload=b"") for _ in range(BATCH)])
            await drain(store, 1)
        return (await entries.read() - before) / claims

    await per_claim()  # the first claim reads all lanes
    few = await per_claim()
    for _ in range(10):
        await store.publish([Message(queue="q", payload=b"") for _ in range(DEAD // 10)])
        await drain(store, DEAD // 10_000, batch=1000)
    many = await per_claim()
    await store.close()
    report("entries per claim", postgres_url, messages=DEAD, few=few, many=many)
    assert few < 5_000
    assert many < 2 * few + 1_000


async def test_after_a_restart_of_the_server_all_lanes_are_read_again(own_postgres: Any) -> None:
    """A replica that took over may give the numbers of known transactions to other ones."""
    store: Any = await millpond.connect(own_postgres.create_database(f"restarted_{uuid4().hex[:8]}"), migrate=True)
    await store.publish([Message(queue="q", payload=b"") for _ in range(3)])
    (claim,) = await store.claim(["q"])
    (lanes,) = store.hints.lanes.values()
    own_postgres.restart()
    round_ = lanes._round
    lanes.fall()
    assert len(await store.claim(["q"], limit=5)) == 2
    assert lanes._round == round_ + 1
    assert await store.settle([Ack(claim.receipt)]) == []
    await store.close()
