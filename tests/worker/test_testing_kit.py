"""`pond.testing()`: a pond in memory, a clock that tests advance, no sleeping, and no call on the real database."""

import asyncio
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import aiosqlite
import pytest

from millpond import AckPolicy, Delivery, Message, Millpond, NackMessage, RejectMessage, Retry, State, Subscribers
from millpond.control import Control
from millpond.errors import BodyNotDecodable, Closed, InvalidOption, MillpondError, Unsupported

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
    assert time.monotonic() - began < 60, "an hour passed without waiting"


async def test_retries_on_a_clock_that_tests_move() -> None:
    async with pond.testing(raise_errors=False) as test:
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
    """For handlers that decide within their own transactions."""
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
        assert len(await test.messages("b", State.COMPLETED)) == 1200
        assert await test.run() == 0


@pytest.mark.parametrize("in_memory", [True, False])
async def test_every_message_is_seen_however_many_there_are(in_memory: bool, sqlite_url: str) -> None:
    pond = Millpond("memory://")

    @pond.subscriber("q", batch=500)
    async def handle(bodies: list[int]) -> None: ...

    async with pond.testing("memory://" if in_memory else sqlite_url) as test:
        await pond.publish_many("q", range(1_100))
        await pond.publish("q", -1, priority=100)
        assert len(await test.messages("q", State.PENDING)) == 1_101
        with pytest.raises(AssertionError, match="1 times, not 0"):
            await test.assert_published("q", -1, times=0)
        await test.run()
        assert sorted(await test.bodies("q", State.COMPLETED)) == list(range(-1, 1_100))


def test_subscribers_of_several_modules_come_together() -> None:
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


# --- nothing reaches the pond's own database ------------------------------------------------------------


def in_thread(work: Callable[[], Any]) -> None:
    """Call it in a thread, and wait for that without letting the event loop run, as a synchronous test client does."""
    thread = threading.Thread(target=work)
    thread.start()
    thread.join(60)
    assert not thread.is_alive()


@pytest.fixture
def real(tmp_path: Path) -> Path:
    return tmp_path / "real.db"


@pytest.mark.parametrize("database", ["memory://", "sqlite"])
async def test_no_way_to_publish_reaches_the_database_of_the_pond(real: Path, tmp_path: Path, database: str) -> None:
    shop = Millpond(f"sqlite:///{real}")
    got: list[str] = []

    @shop.subscriber("first")
    def first(body: str) -> None:
        shop.publish_sync("second", f"{body}, handler's thread")
        in_thread(lambda: asyncio.run(publish_here(f"{body}, another event loop")))

    async def publish_here(body: str) -> None:
        await shop.publish("second", body)
        await (await shop.transport).close()

    @shop.subscriber("third")
    async def third(body: str) -> None:
        shop.publish_sync("second", f"{body}, event loop")

    @shop.subscriber("second")
    async def second(body: str) -> None:
        got.append(body)

    async with shop.testing(database.replace("sqlite", f"sqlite:///{tmp_path}/test.db")) as test:
        shop.publish_sync("first", "published in the test's thread")
        in_thread(lambda: shop.publish_sync("first", "published in a thread"))
        await shop.publish("third", "published by await")
        await shop.publish_many("third", ["published with others"])
        await test.run()
        control = Control(await shop.transport)
        await control.operations.pause("second")
        assert (await control.operations.count(["second"]))[0].paused
    assert sorted(got) == [
        "published by await, event loop",
        "published in a thread, another event loop",
        "published in a thread, handler's thread",
        "published in the test's thread, another event loop",
        "published in the test's thread, handler's thread",
        "published with others, event loop",
    ]
    assert not real.exists()


async def test_a_publish_within_a_transaction_is_refused_in_memory(real: Path, tmp_path: Path) -> None:
    """It would be written to the database of that transaction, which is not the one under test."""
    shop = Millpond(f"sqlite:///{real}")
    async with aiosqlite.connect(tmp_path / "own.db") as own, shop.testing():
        with pytest.raises(
            Unsupported, match=r"TRANSACTIONS; in a test give pond\.testing the URL of an empty database"
        ):
            await shop.publish("orders", 1, within=own)
        with pytest.raises(Unsupported, match="TRANSACTIONS"):
            shop.publish_sync("orders", 1, within=own)
    assert not real.exists()


async def test_a_publish_within_a_transaction_of_the_test_database(real: Path, tmp_path: Path) -> None:
    shop = Millpond(f"sqlite:///{real}")
    got: list[int] = []

    @shop.subscriber("orders")
    async def ship(body: int) -> None:
        got.append(body)

    async with shop.testing(f"sqlite:///{tmp_path}/test.db", table_prefix="jobs_") as test:
        async with aiosqlite.connect(tmp_path / "test.db") as session:
            await shop.publish("orders", 1, within=session)
            await session.rollback()
            await shop.publish("orders", 2, within=session)
            await session.commit()
        assert await test.run() == 1
    assert got == [2]
    assert not real.exists()


async def test_a_program_under_test_may_close_its_pond() -> None:
    shop = Millpond("postgresql://nobody@localhost:1/never-connected")

    async def program() -> None:
        async with shop:
            await shop.publish("orders", 1)

    for _ in range(2):
        async with shop.testing() as test:
            await program()
            in_thread(lambda: asyncio.run(program()))
            shop.close_sync()
            assert await test.bodies("orders") == [1, 1]


async def test_a_program_under_test_may_disconnect_its_pond() -> None:
    """The lifespan of a web application does so at its end."""
    shop = Millpond("postgresql://nobody@localhost:1/never-connected")
    async with shop.testing() as test:
        for _ in range(2):
            await shop.publish("orders", 1)
            await shop.disconnect()
        in_thread(lambda: asyncio.run(shop.disconnect()))
        assert await test.bodies("orders") == [1, 1]
    with pytest.raises(Closed):
        await test.bodies("orders")


def test_verbs_that_a_module_keeps_reach_the_database_of_the_test(real: Path) -> None:
    shop = Millpond(f"sqlite:///{real}")
    control, pause = shop.control_sync, shop.control_sync.operations.pause
    with shop.testing_sync():
        shop.publish_sync("orders", 1)
        pause("orders")
        assert [(stats.queue, stats.paused) for stats in control.operations.count()] == [("orders", True)]
    assert not real.exists()


async def test_one_test_at_a_time() -> None:
    """The end of one would lead the calls of the other to the real database."""
    async with pond.testing() as test:
        with pytest.raises(MillpondError, match="tested already"):
            async with pond.testing():
                raise AssertionError
        await pond.publish("orders", {"sku": 7})
        assert await test.bodies("orders") == [{"sku": 7}]


async def test_wrong_options_of_a_test() -> None:
    with pytest.raises(InvalidOption, match="table_prefix"):
        async with pond.testing("sqlite:///never.db", table_prefiks="x"):
            raise AssertionError
    async with pond.testing() as test:
        assert await test.messages("orders") == []


# --- errors of handlers ---------------------------------------------------------------------------------


def failing(kind: str) -> Millpond:
    """A pond whose handler fails in this way for the body "bad"."""
    shop = Millpond("memory://")

    def check(body: str) -> None:
        assert body != "bad", "my assertion"

    async def async_handler(body: str) -> None:
        check(body)

    async def waiting_handler(body: str) -> None:
        await asyncio.sleep(0)
        check(body)

    def sync_handler(body: str) -> None:
        check(body)

    async def batch_handler(bodies: list[str]) -> None:
        for body in bodies:
            check(body)

    async def decided_handler(body: str, delivery: Delivery) -> None:
        await delivery.ack()
        check(body)

    handlers: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
        "async": (async_handler, {}),
        "waiting": (waiting_handler, {}),
        "thread": (sync_handler, {}),
        "batch": (batch_handler, {"batch": 10}),
        "decided": (decided_handler, {}),
        "rejected": (async_handler, {"ack_policy": AckPolicy.REJECT_ON_ERROR}),
        "never again": (async_handler, {"retry": Retry(never=(AssertionError,))}),
        "at once again": (async_handler, {"retry": Retry.constant(0, attempts=None)}),
    }
    handler, options = handlers[kind]
    shop.subscriber("q", **options)(handler)
    return shop


@pytest.mark.parametrize(
    "kind", ["async", "waiting", "thread", "batch", "decided", "rejected", "never again", "at once again"]
)
async def test_an_error_of_a_handler_is_raised(kind: str) -> None:
    shop = failing(kind)
    async with shop.testing() as test:
        id_ = await shop.publish("q", "bad")
        with pytest.raises(AssertionError, match="my assertion") as raised:
            await test.run()
        assert str(id_) in raised.value.__notes__[0]
        (message,) = await test.messages("q")
        assert message.attempts == 1, "its outcome was written first"


@pytest.mark.parametrize("kind", ["async", "waiting", "thread", "batch", "rejected", "never again"])
async def test_or_left_to_the_retry_policy(kind: str) -> None:
    shop = failing(kind)
    async with shop.testing(raise_errors=False) as test:
        await shop.publish("q", "bad")
        assert await test.run() == 1
        (message,) = await test.messages("q")
        assert (message.error or "").startswith("AssertionError: my assertion")


async def test_a_body_that_does_not_fit_its_handler_is_raised() -> None:
    shop = Millpond("memory://")

    @shop.subscriber("q")
    async def handle(body: int) -> None: ...

    async with shop.testing() as test:
        await shop.publish("q", "seven")
        with pytest.raises(BodyNotDecodable, match=r"the body does not match .*handle"):
            await test.run()


async def test_decisions_of_a_handler_are_no_errors() -> None:
    shop = Millpond("memory://")

    @shop.subscriber("q")
    async def handle(body: str) -> None:
        raise NackMessage("later", delay=60) if body == "nack" else RejectMessage("never")

    async with shop.testing() as test:
        await shop.publish_many("q", ["nack", "reject"])
        assert await test.run() == 2
        assert {message.state for message in await test.messages("q")} == {State.RETRYABLE, State.FAILED}
