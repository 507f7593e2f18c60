"""Decisions within the handler's own transaction, and `once`: an effect that happens once.

After a commit the message is settled; after a rollback the retry policy decides.
"""

import asyncio
import contextlib
import sqlite3
from collections.abc import AsyncIterator, Iterator, Sequence
from typing import Any
from uuid import UUID

import asyncpg
import pytest
import sqlalchemy
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine

from millpond import Delivery, LeaseLost, Millpond, Nack, Receipt, Retry, State
from millpond.clock import Seconds
from millpond.seam.transport import DEFAULT_LEASE
from millpond.telemetry import Counters
from millpond.worker.worker import Worker
from tests.waiting import until
from tests.worker.conftest import became, counts, on, row, working

AGAIN = Retry.constant(60)
DRIVERS = {"sqlite": "aiosqlite", "postgresql": "asyncpg", "mysql": "asyncmy"}


class Database:
    """A table of effects beside the messages, and sessions to it."""

    def __init__(self, url: str) -> None:
        scheme, _, rest = url.partition("://")
        self.engine = create_async_engine(f"{scheme}+{DRIVERS[scheme]}://{rest}")

    @contextlib.asynccontextmanager
    async def session(self) -> AsyncIterator[AsyncSession]:
        async with AsyncSession(self.engine) as session:
            yield session

    async def effects(self) -> int:
        async with self.session() as session:
            return int((await session.execute(sqlalchemy.text("SELECT count(*) FROM effect"))).scalar_one())


async def effect(session: AsyncSession) -> None:
    await session.execute(sqlalchemy.text("INSERT INTO effect (n) VALUES (1)"))


@pytest.fixture
async def database(url: str, pond: Millpond) -> AsyncIterator[Database]:
    await pond.transport  # a new SQLite file gets its tables
    database = Database(url)
    async with database.engine.begin() as connection:
        await connection.execute(sqlalchemy.text("CREATE TABLE effect (n INT)"))
    yield database
    async with database.engine.begin() as connection:
        await connection.execute(sqlalchemy.text("DROP TABLE effect"))
    await database.engine.dispose()


async def idle(pond: Millpond) -> None:
    await pond.run(until_idle=True, signals=False)


async def handled(pond: Millpond, bodies: list[Any]) -> list[UUID]:
    """Ids of these bodies, after their handlers ran."""
    ids = await pond.publish_many("q", bodies)
    await idle(pond)
    return ids


databases = on("sqlite", "postgresql", "mariadb")


@databases
async def test_a_committed_ack_is_done(pond: Millpond, database: Database) -> None:
    counters = Counters()
    pond.telemetry.subscribe(counters)

    @pond.subscriber("q", retry=AGAIN)
    async def handle(body: int, delivery: Delivery) -> None:
        async with database.session() as session:
            await effect(session)
            await delivery.ack(within=session)
            await session.commit()
        if body == 2:
            raise ValueError("after the commit")

    ids = await pond.publish_many("q", [1, 2])
    await idle(pond)
    for id_ in ids:
        found = await row(pond, id_)
        assert (found.state, found.attempts, found.deliveries) == (State.COMPLETED, 1, 1)
    assert await database.effects() == 2
    assert counters.as_dict() == {"published": 2, "claimed": 2, "redelivered": 0, "ack": 2}


@databases
async def test_a_rolled_back_ack_is_retried(pond: Millpond, database: Database) -> None:
    @pond.subscriber("q", retry=AGAIN)
    async def handle(body: str, delivery: Delivery) -> None:
        async with database.session() as session:
            await effect(session)
            await delivery.ack(within=session)
            if body == "raise":
                raise ValueError("before the commit")
            await session.rollback()

    raised, forgot = await pond.publish_many("q", ["raise", "forget"])
    await idle(pond)
    assert await database.effects() == 0
    found = await row(pond, raised)
    assert (found.state, found.attempts, found.error) == (State.RETRYABLE, 1, "ValueError: before the commit")
    found = await row(pond, forgot)
    assert found.state is State.RETRYABLE
    assert found.error is not None and found.error.startswith("RolledBack: ")


@databases
async def test_a_rolled_back_ack_keeps_the_lease(pond: Millpond, database: Database) -> None:
    """The worker finds out about the rollback without a write."""

    @pond.subscriber("q", retry=AGAIN, lease=600)
    async def handle(body: int, delivery: Delivery) -> None:
        async with database.session() as session:
            await delivery.ack(within=session)
            await session.rollback()

    id_ = await pond.publish("q", 1)
    transport = Extended(await pond.transport)
    worker = Worker(pond.subscriptions, until_idle=True)
    await worker.run(transport)  # type: ignore[arg-type]
    assert (await row(pond, id_)).state is State.RETRYABLE
    assert transport.leases == []


class Extended:
    """A transport that records the leases of extensions."""

    def __init__(self, transport: Any) -> None:
        self._transport = transport
        self.leases: list[Seconds] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    async def extend(self, receipts: Sequence[Receipt], lease: Seconds = DEFAULT_LEASE) -> list[Receipt]:
        self.leases.append(lease)
        refused: list[Receipt] = await self._transport.extend(receipts, lease)
        return refused


@databases
@pytest.mark.parametrize(("verb", "state"), [("nack", State.RETRYABLE), ("reject", State.FAILED)])
async def test_nack_and_reject_within(pond: Millpond, database: Database, verb: str, state: State) -> None:
    @pond.subscriber("q", retry=Retry(attempts=2))
    async def handle(body: int, delivery: Delivery) -> None:
        arguments: dict[str, Any] = {"delay": 60} if verb == "nack" else {"reason": "why"}
        async with database.session() as session:
            await effect(session)
            await getattr(delivery, verb)(within=session, **arguments)
            await session.commit()

    id_ = await pond.publish("q", 1)
    await idle(pond)
    found = await row(pond, id_)
    assert (found.state, found.attempts, found.deliveries) == (state, 1, 1)
    assert await database.effects() == 1


@databases
async def test_a_decision_may_be_made_again_after_a_rollback(pond: Millpond, database: Database) -> None:
    """Handlers do this after a transaction failed because of a conflict."""

    @pond.subscriber("q", retry=AGAIN)
    async def handle(body: str, delivery: Delivery) -> None:
        async with database.session() as session:
            await delivery.ack(within=session)
            await session.rollback()
            if body == "reject":
                await delivery.reject("not even twice")
                return
            await effect(session)
            await delivery.ack(within=session)
            await session.commit()

    again, rejected = await pond.publish_many("q", ["again", "reject"])
    await idle(pond)
    assert (await row(pond, again)).state is State.COMPLETED
    assert await database.effects() == 1
    assert (await row(pond, rejected)).reason == "not even twice"


@databases
async def test_a_committed_decision_beats_later_ones(pond: Millpond, database: Database) -> None:
    @pond.subscriber("q", retry=AGAIN)
    async def handle(body: int, delivery: Delivery) -> None:
        async with database.session() as session:
            await delivery.ack(within=session)
            await session.commit()
        await delivery.ack()
        await delivery.reject("too late")
        raise ValueError

    id_ = await pond.publish("q", 1)
    await idle(pond)
    assert (await row(pond, id_)).state is State.COMPLETED


@on("postgresql")
async def test_a_handler_that_runs_on_after_its_commit_is_not_taken_for_lost(
    pond: Millpond, database: Database
) -> None:
    extended = asyncio.Event()

    @pond.subscriber("q", heartbeat=0.1)
    async def handle(body: int, delivery: Delivery) -> None:
        async with database.session() as session:
            await delivery.ack(within=session)
            await session.commit()
        assert pond.worker is not None
        await until(lambda: pond.worker.in_flight == 0)  # the heartbeat found the message settled
        extended.set()

    async with working(pond):
        id_ = await pond.publish("q", 1)
        async with asyncio.timeout(60):
            await extended.wait()
        assert pond.worker is not None and pond.worker.lost == 0
    assert (await row(pond, id_)).state is State.COMPLETED


@databases
async def test_a_stale_ack_within_raises_and_takes_the_effect_with_it(pond: Millpond, database: Database) -> None:
    from tests.worker.test_policies import settle_by_another

    stolen, raised = asyncio.Event(), asyncio.Event()

    @pond.subscriber("q", retry=AGAIN)
    async def handle(body: int, delivery: Delivery) -> None:
        await stolen.wait()
        async with database.session() as session:
            await effect(session)
            try:
                await delivery.ack(within=session)
            except LeaseLost:
                raised.set()
                raise
            await session.commit()

    async with working(pond):
        id_ = await pond.publish("q", 1)
        await became(pond, id_, State.PROCESSING)
        await settle_by_another(pond)
        stolen.set()
        async with asyncio.timeout(60):
            await raised.wait()
        assert pond.worker is not None
        await until(lambda: pond.worker.lost == 1 and pond.worker.in_flight == 0)
    assert await database.effects() == 0
    assert (await row(pond, id_)).reason == "by another"


@databases
async def test_a_refusal_that_was_rolled_back_does_not_keep_the_message(pond: Millpond, database: Database) -> None:
    """What the handler's transaction saw is no proof that another worker has the message."""
    redelivered = []

    @pond.subscriber("q", lease=1)
    async def handle(body: str, delivery: Delivery) -> None:
        redelivered.append(delivery.redelivered)
        if delivery.redelivered:
            return
        async with database.session() as session:
            await (await pond.transport).settle([Nack(delivery.claim.receipt)], within=session)
            with pytest.raises(LeaseLost):
                await delivery.ack(within=session)
            await session.rollback()

    id_ = await pond.publish("q", "x")
    async with working(pond):
        await became(pond, id_, State.COMPLETED)
    assert redelivered == [False, True]


@on("postgresql")
async def test_a_snapshot_older_than_the_claim_does_not_keep_the_message(pond: Millpond, url: str) -> None:
    old = await asyncpg.connect(url)
    transaction = old.transaction(isolation="repeatable_read")
    await transaction.start()
    await old.fetch("SELECT 1 FROM millpond_message")

    @pond.subscriber("q", lease=1)
    async def handle(body: str, delivery: Delivery) -> None:
        if not delivery.redelivered:
            await delivery.ack(within=old)

    id_ = await pond.publish("q", "x")
    async with working(pond):
        found = await became(pond, id_, State.COMPLETED)
    assert found.deliveries == 2
    await transaction.rollback()
    await old.close()


@databases
async def test_once_lets_an_effect_happen_once_though_the_message_comes_twice(
    pond: Millpond, database: Database
) -> None:
    first = []

    @pond.subscriber("q", retry=Retry.constant(0, attempts=3))
    async def handle(body: int, delivery: Delivery) -> None:
        async with database.session() as session:
            if await delivery.once("effect", within=session):
                await effect(session)
                first.append(delivery.attempt)
            await session.commit()
        if delivery.attempt < 3:
            raise ValueError("a crash after the effect, before the ack")

    id_ = await pond.publish("q", 1)
    await idle(pond)
    await became(pond, id_, State.COMPLETED)
    assert (first, await database.effects()) == ([1], 1)


@on("postgresql")
async def test_asyncpg(pond: Millpond, database: Database, url: str) -> None:
    @pond.subscriber("q", retry=AGAIN)
    async def handle(commit: bool, delivery: Delivery) -> None:
        connection = await asyncpg.connect(url)
        try:
            transaction = connection.transaction()
            await transaction.start()
            assert await delivery.once("k", within=connection)
            await connection.execute("INSERT INTO effect VALUES (1)")
            await delivery.ack(within=connection)
            await (transaction.commit() if commit else transaction.rollback())
        finally:
            await connection.close()

    committed, rolled_back = await pond.publish_many("q", [True, False])
    await idle(pond)
    assert (await row(pond, committed)).state is State.COMPLETED
    assert (await row(pond, rolled_back)).state is State.RETRYABLE
    assert await database.effects() == 1


@on("sqlite")
async def test_sqlite3_in_a_sync_handler(pond: Millpond, database: Database, url: str) -> None:
    @contextlib.contextmanager
    def connected() -> Iterator[sqlite3.Connection]:
        with contextlib.closing(sqlite3.connect(url.removeprefix("sqlite:///"), timeout=10)) as connection:
            yield connection

    @pond.subscriber("q", retry=AGAIN)
    def handle(commit: bool, delivery: Delivery) -> None:
        with connected() as connection:
            connection.execute("INSERT INTO effect VALUES (1)")
            assert delivery.once_sync("k", within=connection)
            delivery.ack_sync(within=connection)
            if commit:
                connection.commit()

    committed, rolled_back = await pond.publish_many("q", [True, False])
    await idle(pond)
    assert (await row(pond, committed)).state is State.COMPLETED
    assert (await row(pond, rolled_back)).state is State.RETRYABLE
    assert await database.effects() == 1


@pytest.fixture
def engine(url: str) -> Iterator[sqlalchemy.Engine]:
    scheme, _, rest = url.partition("://")
    driver = {"sqlite": "pysqlite", "postgresql": "psycopg", "mysql": "pymysql"}[scheme]
    engine = sqlalchemy.create_engine(f"{scheme}+{driver}://{rest}")
    yield engine
    engine.dispose()


@databases
@pytest.mark.parametrize("commit", [True, False])
async def test_nack_sync_and_reject_sync_within(
    pond: Millpond, database: Database, engine: sqlalchemy.Engine, commit: bool
) -> None:
    """A rolled-back decision does not count; the retry policy then decides."""

    @pond.subscriber("q", retry=Retry(attempts=2) if commit else Retry.none())
    def handle(verb: str, delivery: Delivery) -> None:
        with sqlalchemy.orm.Session(engine) as session:
            session.execute(sqlalchemy.text("INSERT INTO effect (n) VALUES (1)"))
            if verb == "nack":
                delivery.nack_sync(60, error="no carrier", within=session)
            else:
                delivery.reject_sync("unknown sku", within=session)
            if commit:
                session.commit()

    nacked, rejected = [await row(pond, id_) for id_ in await handled(pond, ["nack", "reject"])]
    if commit:
        assert (nacked.state, nacked.attempts, nacked.error) == (State.RETRYABLE, 1, "no carrier")
        assert (rejected.state, rejected.attempts, rejected.reason) == (State.FAILED, 1, "unknown sku")
    else:
        for found in (nacked, rejected):
            assert found.state is State.FAILED
            assert found.error is not None and found.error.startswith("RolledBack: ")
    assert await database.effects() == (2 if commit else 0)


@databases
async def test_the_same_by_sqlalchemy_sessions_without_an_event_loop(
    pond: Millpond, database: Database, engine: sqlalchemy.Engine
) -> None:
    @pond.subscriber("q", retry=AGAIN)
    def handle(commit: bool, delivery: Delivery) -> None:
        with sqlalchemy.orm.Session(engine) as session:
            session.execute(sqlalchemy.text("INSERT INTO effect (n) VALUES (1)"))
            delivery.ack_sync(within=session)
            pond.publish_sync("shipped", 1, within=session)
            if commit:
                session.commit()

    await pond.publish_many("q", [True, False])
    await idle(pond)
    assert await counts(pond) == {State.COMPLETED: 1, State.RETRYABLE: 1}
    assert await counts(pond, "shipped") == {State.PENDING: 1}
    assert await database.effects() == 1
