"""`publish(unique=…)` from programs: results, errors, within transactions, and many processes at once."""

import asyncio
from datetime import timedelta
from typing import Any

import pytest

from millpond import Millpond, PublishedId, State
from millpond.errors import NotUnique, Unsupported
from tests.rooms.transactions.callers import sqlalchemy_url
from tests.waiting import until
from tests.worker.conftest import on

DRIVERS = {"sqlite": "pysqlite", "postgresql": "psycopg", "mysql": "pymysql", "mariadb": "pymysql"}


async def test_the_caller_learns_the_result() -> None:
    pond = Millpond("memory://")

    @pond.subscriber("invoices")
    def invoice(body: int) -> None: ...

    async with pond.testing() as test:
        first = await invoice.publish(1, unique="invoice-7")
        assert (first.new, first.result) == (True, "published")
        second = pond.publish_sync("invoices", 2, unique="invoice-7")
        assert isinstance(second, PublishedId) and second == first
        assert (second.new, second.result) == (False, "kept")
        third = await invoice.publish(3, unique="invoice-7", delay=5, on_conflict="replace")
        assert (third, third.result) == (first, "replaced")
        fourth = await invoice.publish(4, unique="invoice-7", delay=60, on_conflict="postpone")
        assert fourth.result == "postponed"
        with pytest.raises(NotUnique, match=str(first)) as raised:
            await invoice.publish(5, unique="invoice-7", on_conflict="raise")
        assert raised.value.id == first
        await test.assert_published("invoices", 3, delay=60)
        test.advance(60)
        assert await test.run() == 1
        day = {"unique": "invoice-7", "while_": timedelta(days=1)}
        assert (await invoice.publish(6, **day)).result == "kept", "the first one was published a minute ago"
        test.advance(24 * 3600)
        assert (await invoice.publish(6, **day)).new
        await test.run()
        assert (await invoice.publish(7, **day)).result == "kept"


@on("sqlite", "postgresql", "mariadb")
@pytest.mark.parametrize("level", ["READ COMMITTED", "REPEATABLE READ"])
async def test_within_a_transaction(pond: Millpond, url: str, level: str) -> None:
    import sqlalchemy
    from sqlalchemy.orm import Session

    await pond.transport
    options: dict[str, Any] = {} if url.startswith("sqlite") else {"isolation_level": level}
    engine = sqlalchemy.create_engine(sqlalchemy_url(url, DRIVERS[url.partition(":")[0]]), **options)

    def publish(body: int, end: str) -> PublishedId:
        with Session(engine) as session:
            published = pond.publish_sync("q", body, unique="v", within=session)
            getattr(session, end)()
            return published

    assert (await asyncio.to_thread(publish, 1, "rollback")).new
    first = await asyncio.to_thread(publish, 2, "commit")
    assert first.new
    assert (await asyncio.to_thread(publish, 3, "commit")) == first
    engine.dispose()
    (stats,) = await (await pond.transport).operations.count(["q"])
    assert stats.counts[State.PENDING] == 1


@on("postgresql", "mariadb")
async def test_a_kept_message_cannot_be_claimed_before_the_callers_commit(pond: Millpond, url: str) -> None:
    """Otherwise its handler would not see the changes for which the caller wanted it to run."""
    import sqlalchemy
    from sqlalchemy.orm import Session

    transport = await pond.transport
    id_ = await pond.publish("q", 1, unique="v")
    engine = sqlalchemy.create_engine(sqlalchemy_url(url, DRIVERS[url.partition(":")[0]]))
    with Session(engine) as session:
        assert pond.publish_sync("q", 2, unique="v", within=session) == id_
        assert await transport.claim(["q"]) == []
        session.commit()
    engine.dispose()
    assert [claim.receipt.id for claim in await transport.claim(["q"])] == [id_]


@on("sqlite", "postgresql", "mariadb")
async def test_publishers_against_workers_leave_no_trigger_unhandled(pond: Millpond) -> None:
    """Each publish is followed by a run that begins after it, however claims and publishes interleave."""
    seen, written = [], 0

    @pond.subscriber("q", max_workers=4)
    async def handle(body: int) -> None:
        seen.append(written)

    run = asyncio.create_task(pond.run(signals=False))

    async def publisher() -> None:
        nonlocal written
        for _ in range(25):
            written += 1
            await pond.publish("q", 0, unique="v", on_conflict="keep")

    await asyncio.gather(*(publisher() for _ in range(4)))
    await until(lambda: seen and seen[-1] == 100)
    pond.stop()
    await run
    assert len(seen) <= 100


async def test_a_broker_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("aiormq")
    from millpond import Message, Unique
    from millpond.transports.rabbitmq.transport import RabbitTransport

    transport = RabbitTransport.__new__(RabbitTransport)
    monkeypatch.setattr(RabbitTransport, "_check_open", lambda self: None)
    monkeypatch.setattr(transport, "options", type("Options", (), {"body_limit": 100})(), raising=False)
    with pytest.raises(Unsupported, match="UNIQUE"):
        await transport.publish([Message(queue="q", payload=b"", unique=Unique("v"))])
