"""`pond.testing()`: a pond on memory, a clock that tests move, no sleeping."""

import time
from datetime import timedelta

import pytest

from millpond import Delivery, Message, Millpond, Retry, State, Subscribers
from millpond.errors import InvalidOption

pond = Millpond("postgresql://nobody@localhost:1/never-connected")
shipped: list[int] = []


@pond.subscriber("orders", retry=Retry(initial=10, multiplier=2, jitter=0, attempts=3))
async def ship(order: dict, delivery: Delivery) -> None:
    if order["sku"] == 13:
        raise ValueError("out of stock")
    shipped.append(order["sku"])
    await pond.publish("invoices", {"for": order["sku"]}, delay=3600)


@pond.subscriber("invoices")
def invoice(order: dict) -> None:
    pond.publish_sync("mails", order)


@pytest.fixture(autouse=True)
def nothing_shipped() -> None:
    shipped.clear()


async def test_publish_run_and_look() -> None:
    began = time.monotonic()
    async with pond.testing() as test:
        await pond.publish("orders", {"sku": 7})
        assert await test.run() == 1
        assert shipped == [7]
        assert await test.bodies("orders", State.COMPLETED) == [{"sku": 7}]
        assert await test.bodies("invoices", "PENDING") == [{"for": 7}]
        test.advance(timedelta(hours=1))
        assert await test.run() == 1
        assert await test.bodies("mails") == [{"for": 7}]
        (order,) = await test.messages("orders")
        assert (order.attempts, order.deliveries) == (1, 1)
    assert time.monotonic() - began < 60, "an hour went by without waiting"


async def test_retries_on_a_clock_that_tests_move() -> None:
    async with pond.testing() as test:
        await pond.publish("orders", {"sku": 13})
        for wait, state in ((10, State.RETRYABLE), (20, State.RETRYABLE), (0, State.FAILED)):
            await test.run()
            (order,) = await test.messages("orders", state)
            test.advance(wait - 0.001 if wait else 0)
            assert await test.run() == 0, "not due yet"
            test.advance(0.001)
        assert (order.reason, order.error) == ("retries used up", "ValueError: out of stock")
        assert await test.messages("orders", State.COMPLETED) == []


async def test_some_queues_only() -> None:
    async with pond.testing() as test:
        await pond.publish("orders", {"sku": 7})
        await pond.publish("invoices", {"for": 1})
        assert await test.run("invoices") == 1
        assert shipped == []


async def test_each_test_has_messages_of_its_own() -> None:
    for _ in range(2):
        async with pond.testing() as test:
            assert await test.messages("orders") == []
            await pond.publish("orders", {"sku": 7})


async def test_on_a_database(sqlite_url: str) -> None:
    """For handlers that decide within transactions of theirs."""
    async with pond.testing(sqlite_url) as test:
        await pond.publish("orders", {"sku": 7})
        assert await test.run() == 1
        test.advance(3600)
        assert await test.run() == 1
        assert await test.bodies("mails") == [{"for": 7}]


async def test_everything_is_run_however_much_it_is() -> None:
    many = Millpond("memory://")

    @many.subscriber("a", max_workers=3)
    async def first(body: int) -> None:
        await many.publish("b", body)

    @many.subscriber("b", max_workers=3)
    def second(body: int) -> None: ...

    async with many.testing() as test:
        await many.publish_many("a", range(1200))
        assert await test.run() == 2400
        assert len(await test.messages("b", State.COMPLETED)) == 1000  # the first page
        assert await test.run() == 0


def test_subscribers_of_several_modules_come_together() -> None:
    """FS-C27, without prefixes."""
    whole, orders = Millpond("memory://"), Subscribers()

    @orders.subscriber("orders")
    async def ship(order: dict) -> None: ...

    whole.include(orders)
    assert [s.queues for s in whole.subscriptions] == [("orders",)]
    with pytest.raises(InvalidOption, match=r"'orders' has a subscriber already, test_subs.*ship"):
        whole.subscriber("mails", "orders")(ship)


async def test_handlers_can_be_called_as_they_are() -> None:
    async with pond.testing() as test:
        transport = await pond.transport
        await transport.publish([Message(queue="orders", payload=b"{}")])
        (claim,) = await transport.claim(["orders"])
        await ship({"sku": 8}, Delivery(claim, None))  # type: ignore[arg-type]
        assert shipped == [8]
        assert len(await test.messages("invoices")) == 1
