"""A subscriber is called like its function and publishes its own messages; bulk publishing with options for each."""

import inspect
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest

from millpond import Millpond, Publish, State, Subscribers
from millpond.errors import InvalidMessage, InvalidOption
from tests.worker.conftest import on


@dataclass
class Order:
    sku: int


async def test_a_subscriber_publishes_to_its_queue_and_is_called_like_its_function() -> None:
    pond, shipped = Millpond("memory://"), []

    @pond.subscriber("orders", "old orders")
    async def ship(order: Order) -> int:
        """Ship it."""
        shipped.append(order.sku)
        return order.sku

    assert await ship(Order(7)) == 7
    assert (ship.__name__, ship.__doc__, ship.queues) == ("ship", "Ship it.", ("orders", "old orders"))
    assert pond.subscriptions[0].handler is ship.function and inspect.iscoroutinefunction(ship.function)
    async with pond.testing() as test:
        await ship.publish(Order(8), delay=5)
        await ship.publish_many([Order(9), Publish(Order(10), key="c")])
        ship.publish_sync(Order(11))
        ship.publish_many_sync([Order(12)])
        test.advance(5)
        await test.run()
    assert sorted(shipped) == [7, 8, 9, 10, 11, 12]


async def test_subscribers_of_another_module_publish_once_they_are_included() -> None:
    pond, orders = Millpond("memory://"), Subscribers()

    @orders.subscriber("orders")
    def ship(order: Order) -> None: ...

    with pytest.raises(InvalidOption, match="include"):
        await ship.publish(Order(7))
    pond.include(orders)
    async with pond.testing() as test:
        await ship.publish(Order(7))
        assert await test.run() == 1


def test_a_subscriber_can_be_declared_on_a_second_pond() -> None:
    first, second = Millpond("memory://"), Millpond("memory://")

    @second.subscriber("b")
    @first.subscriber("a")
    def handle(body: int) -> int:
        return body

    assert handle(7) == 7 and handle.queue == "b"
    assert first.subscriptions[0].handler is second.subscriptions[0].handler


@on("memory", "sqlite", "postgresql", "mariadb")
async def test_bulk_publishing_takes_options_for_each_body(pond: Millpond) -> None:
    given = uuid4()
    ids = await pond.publish_many(
        "q",
        [1, Publish(2, key="own", priority=1, headers={"n": 2}), Publish(3, id=given, delay=0)],
        key="k",
        delay=60,
    )
    rows = {row.id: row for row in await (await pond.transport).operations.find(ids)}
    one, two, three = (rows[id_] for id_ in ids)
    assert [row.key for row in (one, two, three)] == ["k", "own", "k"]
    assert [round((row.due_us - row.created_us) / 1e6) for row in (one, two, three)] == [60, 60, 0]
    assert (two.priority, two.headers["n"], three.id) == (1, 2, given)


async def test_a_due_time_of_one_body_replaces_the_delay_of_the_call() -> None:
    pond = Millpond("memory://")
    async with pond.testing() as test:
        await pond.publish_many("q", [Publish(1, due_at=test.now + timedelta(hours=1))], delay=5)
        (message,) = await test.published("q")
        assert message.delay == 3600


@on("memory", "sqlite")
async def test_many_are_published_without_an_event_loop(pond: Millpond) -> None:
    import asyncio

    await pond.transport
    ids: Any = await asyncio.to_thread(pond.publish_many_sync, "q", [1, Publish(2, key="k")], priority=3)
    rows = await (await pond.transport).operations.find(ids)
    assert {(row.payload, row.priority, row.key) for row in rows} == {(b"1", 3, None), (b"2", 3, "k")}
    with pytest.raises(InvalidMessage, match="ids"):
        pond.publish_many_sync("q", [1, 2], ids=[uuid4()])


def test_many_within_a_transaction_without_an_event_loop(sqlite_url: str) -> None:
    import sqlalchemy
    from sqlalchemy.orm import Session

    pond = Millpond(sqlite_url)
    assert pond.control_sync.operations.count() == []
    engine = sqlalchemy.create_engine(sqlite_url)
    with Session(engine) as session:
        pond.publish_many_sync("q", [1, 2], within=session)
        session.rollback()
        pond.publish_many_sync("q", [3, 4], within=session)
        session.commit()
    engine.dispose()
    (stats,) = pond.control_sync.operations.count(["q"])
    assert stats.counts[State.PENDING] == 2
    pond.close_sync()


def test_operator_verbs_without_an_event_loop(sqlite_url: str) -> None:
    pond = Millpond(sqlite_url)
    control = pond.control_sync
    id_ = pond.publish_sync("q", 1)
    control.operations.pause("q")
    (stats,) = control.operations.count(["q"])
    assert stats.paused
    control.operations.resume("q")
    assert [row.id for row in control.messages("q")] == [id_]
    assert control.retry([id_]).skipped == {id_: "it is PENDING"}
    assert control.operations.cancel([id_]) == [id_]
    for wrong in ("nothing", "_transport"):
        with pytest.raises(AttributeError):
            getattr(control, wrong)
    pond.close_sync()


async def test_one_of_many_messages_is_unique() -> None:
    async with Millpond("memory://") as pond:
        many = [1, Publish(2, unique="v"), Publish(3, unique="v", on_conflict="replace"), Publish(4, unique="w")]
        ids = await pond.publish_many("q", many)
        assert [id_.result for id_ in ids] == ["published", "published", "replaced", "published"]
        wrong: Any = Publish(5, unique="v", on_conflict="raise")  # type: ignore[arg-type]
        with pytest.raises(InvalidMessage, match="raise"):
            await pond.publish_many("q", [6, wrong])
        (stats,) = await (await pond.transport).operations.count(["q"])
        assert stats.counts["PENDING"] == 3


def test_workers_are_reached_from_synchronous_programs(tmp_path: Path) -> None:
    pond = Millpond(f"sqlite:///{tmp_path}/q.db")
    id_ = pond.publish_sync("q", 1)
    assert pond.control_sync.workers.cancel([id_]) == []  # no worker holds it
    pond.close_sync()
