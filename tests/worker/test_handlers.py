"""Kinds of handlers, their parameters, and the context in which they run."""

import asyncio
import functools
import inspect
import logging
import threading
from contextvars import ContextVar
from typing import Any

import pytest

from millpond import Delivery, Message, Millpond, Retry, State, current_delivery
from millpond.errors import InvalidOption
from tests.waiting import until
from tests.worker.conftest import became, drained, on, working

user: ContextVar[str] = ContextVar("user", default="none")


async def test_an_async_handler_completes_a_message(pond: Millpond) -> None:
    """One COMPLETED row with counters 1/1 and its times in order; the queue is empty."""
    got = []

    @pond.subscriber("q")
    async def handle(body: dict) -> None:
        got.append(body)

    async with working(pond):
        id_ = await pond.publish("q", {"sku": 7})
        row = await became(pond, id_, State.COMPLETED)
    assert got == [{"sku": 7}]
    assert (row.deliveries, row.attempts, row.error, row.reason) == (1, 1, None, None)
    assert row.created_us <= row.first_attempt_us <= row.last_attempt_us <= row.archived_us
    assert await drained(pond) == {State.COMPLETED: 1}


async def test_a_sync_handler_runs_in_a_thread(pond: Millpond) -> None:
    threads = []

    @pond.subscriber("q")
    def handle(body: int) -> None:
        threads.append(threading.current_thread())

    async with working(pond):
        await became(pond, await pond.publish("q", 1), State.COMPLETED)
    assert threads[0] is not threading.main_thread()
    assert threads[0].daemon, "a handler that hangs must not keep the program alive"


@on("memory")
async def test_parameters_are_supplied(pond: Millpond) -> None:
    got: list[Any] = []

    @pond.subscriber("q")
    async def handle(headers: dict, delivery: Delivery, body: dict, message: Message, extra: int = 3) -> None:
        got.extend([headers, delivery, body, message, extra])

    id_ = await pond.publish("q", {"sku": 7}, headers={"trace": "x"}, key="k")
    await pond.run(until_idle=True, signals=False)
    headers, delivery, body, message, extra = got
    assert headers["trace"] == "x"
    assert body == delivery.body == {"sku": 7}
    assert (delivery.id, delivery.queue, delivery.attempt, delivery.redelivered) == (id_, "q", 1, False)
    assert (message.key, message.payload, extra) == ("k", b'{"sku":7}', 3)


@on("memory")
async def test_a_handler_may_ask_for_nothing_or_only_for_the_delivery(pond: Millpond) -> None:
    got: list[Any] = []

    @pond.subscriber("a")
    async def nothing() -> None:
        got.append("nothing")

    @pond.subscriber("b")
    def only(delivery: Delivery) -> None:
        got.append(delivery.message.payload)

    await pond.publish("a", b"\xff not decoded, because no parameter needs it")
    await pond.publish("b", b"\xff neither")
    await pond.run(until_idle=True, signals=False)
    assert sorted(map(str, got)) == sorted(["nothing", str(b"\xff neither")])


class Shop:
    def __init__(self) -> None:
        self.got: list[Any] = []

    async def method(self, body: int) -> None:
        self.got.append(("method", body))

    async def __call__(self, body: int) -> None:
        self.got.append(("call", body))

    async def with_greeting(self, greeting: str, body: int) -> None:
        self.got.append((greeting, body))


@on("memory")
async def test_methods_partials_and_callable_objects_are_handlers(pond: Millpond) -> None:
    shop = Shop()
    pond.subscriber("a")(shop.method)
    pond.subscriber("b")(shop)
    pond.subscriber("c")(functools.partial(shop.with_greeting, "hello"))
    for queue, body in (("a", 1), ("b", 2), ("c", 3)):
        await pond.publish(queue, body)
    await pond.run(until_idle=True, signals=False)
    assert sorted(shop.got) == [("call", 2), ("hello", 3), ("method", 1)]
    assert [s.name for s in pond.subscriptions] == ["Shop.method", "Shop", "Shop.with_greeting"]


@on("memory")
async def test_a_decorator_that_hides_an_async_function_does_not_keep_it_from_running(pond: Millpond) -> None:
    got = []

    def hiding(function: Any) -> Any:
        def wrapper(body: int) -> Any:
            return function(body)

        return wrapper

    @pond.subscriber("q", retry=Retry.none())
    @hiding
    async def handle(body: int) -> None:
        await asyncio.sleep(0)
        got.append(body)
        if body == 2:
            raise ValueError("two")

    ids = await pond.publish_many("q", [1, 2])
    await pond.run(until_idle=True, signals=False)
    assert sorted(got) == [1, 2]
    assert (await became(pond, ids[1], State.FAILED)).error == "ValueError: two"


async def two_bodies(a: dict, b: dict) -> None: ...
async def keyword_only(a: dict, *, b: int) -> None: ...
async def unknown_name(a: "NotDefinedAnywhere") -> None: ...  # type: ignore[name-defined]  # noqa: F821
async def not_a_type(a: inspect) -> None: ...  # type: ignore[valid-type]
async def yields(a: dict) -> Any:
    yield a


def yields_too(a: dict) -> Any:
    yield a


async def no_list(bodies: dict) -> None: ...


@on("memory")
@pytest.mark.parametrize(
    ("handler", "options", "word"),
    [
        (two_bodies, {}, "second body"),
        (keyword_only, {}, "keyword-only 'b'"),
        (unknown_name, {}, "NotDefinedAnywhere"),
        (not_a_type, {}, "cannot be decoded"),
        (yields, {}, "yields"),
        (yields_too, {}, "yields"),
        (no_list, {"batch": 10}, "a list"),
    ],
)
async def test_a_handler_that_cannot_be_called_raises_before_anything_starts(
    pond: Millpond, handler: Any, options: dict, word: str
) -> None:
    started = []
    pond.on_start(lambda: started.append(1))
    pond.subscriber("q", **options)(handler)
    with pytest.raises(InvalidOption, match=word):
        await pond.run(signals=False)
    assert not started


def test_the_function_stays_as_it_is() -> None:
    pond = Millpond("memory://")

    @pond.subscriber("q")
    def double(body: int) -> int:
        return body * 2

    assert double(4) == 8


@pytest.mark.parametrize("kind", ["async", "sync"])
@on("memory")
async def test_context_does_not_leak_from_one_message_to_the_next(pond: Millpond, kind: str) -> None:
    seen = []

    def note(body: int) -> None:
        delivery = current_delivery()
        assert delivery is not None and delivery.body == body
        seen.append(user.get())
        user.set(f"set by {body}")

    if kind == "sync":
        pond.subscriber("q", max_workers=1)(note)
    else:

        @pond.subscriber("q", max_workers=1)
        async def handle(body: int) -> None:
            note(body)
            await asyncio.sleep(0)
            assert user.get() == f"set by {body}", "its own context lasts as long as the handler"
            assert await asyncio.create_task(_whose()) == body, "and reaches its tasks"

    await pond.publish_many("q", [1, 2, 3])
    await pond.run(until_idle=True, signals=False)
    assert seen == ["none"] * 3
    assert current_delivery() is None


async def _whose() -> Any:
    delivery = current_delivery()
    return delivery and delivery.body


@on("memory")
async def test_concurrent_handlers_have_separate_contexts(pond: Millpond) -> None:
    all_here, seen = asyncio.Barrier(5), []

    @pond.subscriber("q", max_workers=5)
    async def handle(body: int) -> None:
        user.set(str(body))
        await all_here.wait()
        seen.append((body, user.get(), await _whose()))

    await pond.publish_many("q", range(5))
    await pond.run(until_idle=True, signals=False)
    assert sorted(seen) == [(n, str(n), n) for n in range(5)]


@on("memory")
async def test_the_correlation_id_is_the_header_or_the_message_id(pond: Millpond) -> None:
    got = []

    @pond.subscriber("q", max_workers=1)
    async def handle(delivery: Delivery) -> None:
        got.append(delivery.correlation_id)

    await pond.publish("q", 1, headers={"correlation-id": "order-7"})
    second = await pond.publish("q", 2)
    await pond.run(until_idle=True, signals=False)
    assert got == ["order-7", str(second)]


@on("memory")
async def test_a_failure_is_logged_with_the_message_but_never_its_body(
    pond: Millpond, caplog: pytest.LogCaptureFixture
) -> None:
    @pond.subscriber("q", retry=Retry.constant(60))
    async def handle(body: dict) -> None:
        raise ValueError("no carrier")

    id_ = await pond.publish("q", {"password": "hunter2"}, headers={"token": "hunter3"})
    with caplog.at_level(logging.DEBUG):
        await pond.run(until_idle=True, signals=False)
    (record,) = [r for r in caplog.records if r.exc_info]
    assert (record.queue, record.message_id) == ("q", str(id_))  # type: ignore[attr-defined]
    assert "again in 60 s" in record.message and "attempt 1" in record.message
    assert "hunter" not in caplog.text


async def test_handlers_publish(pond: Millpond) -> None:
    """Messages that a handler publishes are handled too, also from a sync handler."""
    got = []

    @pond.subscriber("first")
    async def first(body: int) -> None:
        await pond.publish("second", body + 1)

    @pond.subscriber("second")
    def second(body: int) -> None:
        pond.publish_sync("third", body + 1)

    @pond.subscriber("third")
    async def third(body: int) -> None:
        got.append(body)

    async with working(pond, graceful_timeout=10):
        await pond.publish("first", 1)
        await until(lambda: got)
    assert got == [3]


@on("memory")
async def test_a_handler_that_exits_the_program_fails_its_message_only(pond: Millpond) -> None:
    @pond.subscriber("a", retry=Retry.none())
    async def quits(body: int) -> None:
        raise SystemExit(3)

    @pond.subscriber("b", retry=Retry.none())
    def quits_too(body: int) -> None:
        raise SystemExit(4)

    @pond.subscriber("c", retry=Retry.none())
    def stops_iterating(body: int) -> None:
        raise StopIteration

    ids = [await pond.publish(queue, 1) for queue in "abc"]
    await pond.run(until_idle=True, signals=False)
    errors = [(await became(pond, id_, State.FAILED)).error for id_ in ids]
    assert errors == ["SystemExit: 3", "SystemExit: 4", "RuntimeError: the handler raised StopIteration"]


@on("memory")
async def test_a_handler_that_cancels_itself_costs_no_slot(pond: Millpond) -> None:
    done = []

    @pond.subscriber("q", max_workers=1, retry=Retry.none())
    async def handle(body: int) -> None:
        if body == 0:
            task = asyncio.current_task()
            assert task is not None
            task.cancel()
            await asyncio.sleep(1)
        if body == 1:
            raise asyncio.CancelledError
        done.append(body)

    ids = await pond.publish_many("q", range(3))
    await pond.run(until_idle=True, signals=False)
    assert done == [2]
    for id_ in ids[:2]:
        assert "cancelled itself" in ((await became(pond, id_, State.FAILED)).error or "")


@on("memory")
async def test_timeouts_of_the_handlers_own_work(pond: Millpond) -> None:
    """asyncio.timeout cancels its task: here a task that then runs the next message."""

    @pond.subscriber("q", max_workers=1, retry=Retry.none())
    async def handle(body: int) -> None:
        if body == 0:
            async with asyncio.timeout(0.01):
                await asyncio.sleep(60)

    ids = await pond.publish_many("q", range(2))
    await pond.run(until_idle=True, signals=False)
    assert (await became(pond, ids[0], State.FAILED)).error == "TimeoutError"
    await became(pond, ids[1], State.COMPLETED)
