"""Middleware runs around every message, sees the result and cannot change it."""

import asyncio
import inspect
import logging
import threading
from collections.abc import AsyncGenerator, Generator
from contextvars import ContextVar
from typing import Any

import pytest

from millpond import AckPolicy, Delivery, Handling, Millpond, Publication, RejectMessage, Retry, State
from millpond.errors import InvalidOption, MillpondError
from tests.worker.conftest import on

tenant: ContextVar[str] = ContextVar("tenant", default="")
Around = Generator[None, BaseException | None, None]
AsyncAround = AsyncGenerator[None, BaseException | None]


@pytest.mark.parametrize("kind", ["async", "thread", "batch", "batch in a thread", "ack first", "waits"])
async def test_set_up_handler_and_tear_down_in_order_and_in_one_context(kind: str) -> None:
    pond, steps, threads = Millpond("memory://"), [], set()

    @pond.middleware
    def outer(handling: Handling) -> Around:
        threads.add(threading.current_thread())
        steps.append("outer")
        token = tenant.set("t-1")
        assert (yield) is None
        assert tenant.get() == "t-2"  # set by the inner one, in the same context
        tenant.reset(token)
        steps.append("outer ends")

    @pond.middleware
    async def inner(handling: Handling) -> AsyncAround:
        await asyncio.sleep(0)
        assert tenant.get() == "t-1"
        tenant.set("t-2")
        steps.append("inner")
        assert (yield) is None
        steps.append("inner ends")

    def handled(headers: Any) -> None:
        threads.add(threading.current_thread())
        steps.append(tenant.get())

    match kind:
        case "async" | "ack first" | "waits":

            @pond.subscriber("q", ack_policy=AckPolicy.ACK_FIRST if kind == "ack first" else AckPolicy.NACK_ON_ERROR)
            async def handle(body: int, headers: dict) -> None:
                if kind == "waits":
                    await asyncio.sleep(0.01)
                handled(headers)

        case "thread":
            pond.subscriber("q")(lambda body, headers: handled(headers))
        case "batch":

            @pond.subscriber("q", batch=5)
            async def handle_all(bodies: list[int], headers: list[dict]) -> None:
                handled(headers)

        case _:
            pond.subscriber("q", batch=5)(lambda bodies, headers: handled(headers))
    async with pond.testing() as test:
        await pond.publish("q", 1)
        assert await test.run() == 1
        (row,) = await test.messages("q")
    assert steps == ["outer", "inner", "t-2", "inner ends", "outer ends"]
    assert row.state is State.COMPLETED
    assert len(threads) == 1 and (threading.main_thread() in threads) is ("thread" not in kind)


async def test_a_batch_is_surrounded_once_for_each_message() -> None:
    pond, seen = Millpond("memory://"), []

    @pond.middleware
    def each(handling: Handling) -> Around:
        seen.append((handling.message.payload, handling.batch))
        handling.add_headers({"n": len(seen)})
        yield

    @pond.subscriber("q", batch=10)
    async def handle(bodies: list[int], headers: list[dict]) -> None:
        assert [h["n"] for h in headers] == [1, 2, 3]

    async with pond.testing() as test:
        await pond.publish_many("q", [1, 2, 3])
        await test.run()
    assert seen == [(b"1", 3), (b"2", 3), (b"3", 3)]


@pytest.mark.parametrize("is_async", [True, False])
async def test_the_error_is_seen_and_cannot_be_changed(is_async: bool, caplog: pytest.LogCaptureFixture) -> None:
    pond, seen = Millpond("memory://"), []

    @pond.middleware
    def swallow(handling: Handling) -> Around:
        seen.append((yield))

    @pond.middleware
    async def fail(handling: Handling) -> AsyncAround:
        yield
        raise RuntimeError("a middleware is broken")

    @pond.middleware
    def again(handling: Handling) -> Around:
        error = yield
        if error:
            raise error
        yield

    def handle(body: str) -> None:
        if body == "error":
            raise ValueError("broken")
        if body == "reject":
            raise RejectMessage("no")

    async def handle_async(body: str) -> None:
        handle(body)

    pond.subscriber("q", retry=Retry(attempts=1))(handle_async if is_async else handle)
    async with pond.testing(raise_errors=False) as test:
        for body in ("error", "reject", "fine"):
            await pond.publish("q", body)
            await test.run()
        rows = await test.messages("q")
    assert [type(error) for error in seen] == [ValueError, RejectMessage, type(None)]
    assert [(row.state, row.reason) for row in rows] == [
        (State.FAILED, "retries used up"),
        (State.FAILED, "no"),
        (State.COMPLETED, None),
    ]
    texts = [record.getMessage() for record in caplog.records if record.levelno == logging.ERROR]
    assert sum("failed after the handler" in text for text in texts) == 3
    assert sum("yields twice" in text for text in texts) == 1


@pytest.mark.parametrize("is_async", [True, False])
async def test_an_error_in_the_set_up_counts_as_the_handlers_and_ends_the_outer_ones(is_async: bool) -> None:
    pond, steps = Millpond("memory://"), []

    @pond.middleware
    def outer(handling: Handling) -> Around:
        error = yield
        steps.append(type(error))

    @pond.middleware
    def broken(handling: Handling) -> Around:
        if handling.attempt == 1:
            raise ConnectionError("no tenant")
        if handling.attempt == 2:
            return
        yield

    async def handle_async(body: int) -> None:
        steps.append(body)

    def handle(body: int) -> None:
        steps.append(body)

    pond.subscriber("q", retry=Retry(initial=1, jitter=0, attempts=3))(handle_async if is_async else handle)
    async with pond.testing(raise_errors=False) as test:
        await pond.publish("q", 7)
        for _ in range(3):
            await test.run()
            test.advance(60)
        (row,) = await test.messages("q")
    assert steps == [ConnectionError, MillpondError, 7, type(None)]
    assert (row.state, row.attempts) == (State.COMPLETED, 3)


async def test_a_decision_in_the_set_up_decides_as_the_handlers() -> None:
    pond = Millpond("memory://")

    @pond.middleware
    def check(handling: Handling) -> Around:
        raise RejectMessage("no tenant")
        yield

    pond.subscriber("q")(lambda body: None)
    async with pond.testing() as test:
        await pond.publish("q", 1)
        await test.run()
        (row,) = await test.messages("q")
    assert (row.state, row.reason) == (State.FAILED, "no tenant")


async def test_a_timeout_reaches_the_middleware_as_a_cancellation() -> None:
    pond, seen = Millpond("memory://"), []

    @pond.middleware
    async def watch(handling: Handling) -> AsyncAround:
        seen.append(((yield), handling.interrupted))

    @pond.subscriber("q", timeout=0.05, retry=Retry(attempts=1))
    async def handle(body: int) -> None:
        await asyncio.Event().wait()

    async with pond.testing(raise_errors=False) as test:
        await pond.publish("q", 1)
        await test.run()
        (row,) = await test.messages("q")
    ((error, interrupted),) = seen
    assert isinstance(error, asyncio.CancelledError) and interrupted
    assert row.state is State.FAILED and "longer than" in (row.error or "")


@pytest.mark.parametrize("outer_is_async", [True, False])
async def test_an_interrupted_tear_down_ends_the_outer_middleware_too(outer_is_async: bool) -> None:
    pond, seen, ended = Millpond("memory://"), [], []

    @pond.middleware
    def outermost(handling: Handling) -> Around:
        seen.append((yield))

    async def waits(handling: Handling) -> AsyncAround:
        seen.append((yield))
        await asyncio.sleep(0)
        ended.append(True)

    def plain(handling: Handling) -> Around:
        seen.append((yield))
        ended.append(True)

    pond.middleware(waits if outer_is_async else plain)

    @pond.middleware
    async def waits_for_ever(handling: Handling) -> AsyncAround:
        seen.append((yield))
        await asyncio.Event().wait()

    @pond.subscriber("q", timeout=0.05, retry=Retry(attempts=1))
    async def handle(body: int) -> None: ...

    async with pond.testing(raise_errors=False) as test:
        await pond.publish("q", 1)
        await test.run()
        (row,) = await test.messages("q")
    assert [type(error) for error in seen] == [type(None), asyncio.CancelledError, asyncio.CancelledError]
    assert ended == [True]
    assert row.state is State.COMPLETED  # the handler had returned


async def test_an_interrupted_tear_down_in_the_loop_ends_the_outer_middleware_of_a_thread() -> None:
    pond, seen = Millpond("memory://"), []

    @pond.middleware
    async def outermost(handling: Handling) -> AsyncAround:
        seen.append((yield))

    @pond.middleware
    def outer(handling: Handling) -> Around:
        seen.append((yield))

    @pond.middleware
    async def interrupted(handling: Handling) -> AsyncAround:
        yield
        task = asyncio.current_task()
        assert task is not None
        task.cancel()
        await asyncio.sleep(0)

    pond.subscriber("q", retry=Retry(attempts=1))(lambda body: None)
    async with pond.testing(raise_errors=False) as test:
        await pond.publish("q", 1)
        await test.run()
    assert [type(error).__name__ for error in seen] == ["CancelledError", "CancelledError"]


@pytest.mark.parametrize("batch", [None, 2])
@pytest.mark.parametrize("is_async", [True, False])
@pytest.mark.parametrize("cancels", [True, False])
async def test_a_tear_down_that_hangs_or_is_cancelled_changes_no_result(
    cancels: bool, is_async: bool, batch: int | None, caplog: pytest.LogCaptureFixture
) -> None:
    """The handler has returned, or has failed with an error of its own, when it is interrupted as by its timeout."""
    pond = Millpond("memory://")

    @pond.middleware
    async def hangs(handling: Handling) -> AsyncAround:
        yield
        if cancels:
            raise asyncio.CancelledError
        for slot in handling._delivery._settler._slots:
            slot.interrupt("timeout")
        await asyncio.Event().wait()

    def handle(body: Any) -> None:
        if body in (2, [2]):
            raise ValueError("out of stock")

    async def handle_async(body: Any) -> None:
        handle(body)

    pond.subscriber("q", batch=batch, max_workers=1, retry=Retry(attempts=1))(
        (handle_async if is_async else handle) if batch is None else _of_list(handle_async if is_async else handle)
    )
    async with pond.testing(raise_errors=False) as test:
        for body in (1, 2):
            await pond.publish("q", body)
            await test.run()
        rows = await test.messages("q")
    assert [(row.state, row.error) for row in rows] == [
        (State.COMPLETED, None),
        (State.FAILED, "ValueError: out of stock"),
    ]
    interrupted = [record.message for record in caplog.records if "after its handler had ended" in record.message]
    assert len(interrupted) == (0 if cancels else 2)


def _of_list(handle: Any) -> Any:
    if inspect.iscoroutinefunction(handle):

        async def of_list_async(body: list[Any]) -> None:
            await handle(body)

        return of_list_async

    def of_list(body: list[Any]) -> None:
        handle(body)

    return of_list


async def test_middleware_reads_and_decides_nothing() -> None:
    pond, seen = Millpond("memory://"), []

    @pond.middleware
    def read(handling: Handling) -> Around:
        for name in ("body", "receipt", "decided", "id"):
            with pytest.raises(AttributeError):
                setattr(handling, name, None)
        assert not hasattr(handling, "ack") and not hasattr(handling, "reject")
        yield
        seen.append(
            (handling.id, handling.queue, handling.attempt, handling.redelivered, type(handling.decided).__name__)
        )

    @pond.subscriber("q", ack_policy=AckPolicy.MANUAL)
    async def handle(body: int, delivery: Delivery) -> None:
        await delivery.ack()

    async with pond.testing() as test:
        id_ = await pond.publish("q", 1)
        await test.run()
    assert seen == [(id_, "q", 1, False, "Ack")]


@pytest.mark.parametrize("function", [lambda handling: None, print, 7])
def test_a_function_without_yield_is_refused(function: Any) -> None:
    pond = Millpond("memory://")
    with pytest.raises(InvalidOption, match="yield"):
        pond.middleware(function)
    with pytest.raises(InvalidOption, match="yields"):
        pond.publish_middleware(function)


@on("memory", "sqlite")
async def test_every_publish_gets_the_headers_and_the_callers_win(pond: Millpond) -> None:
    calls: list[Any] = []

    @pond.publish_middleware
    def stamp(publication: Publication) -> Generator[dict[str, Any], BaseException | None, None]:
        error = yield {"tenant": tenant.get(), "source": "middleware"}
        calls.append((publication.queue, publication.count, len(publication.ids), error))

    token = tenant.set("t-1")
    ids = [
        await pond.publish("q", 1, headers={"source": "caller"}),
        *await pond.publish_many("q", [2, 3]),
        await asyncio.to_thread(pond.publish_sync, "q", 4),
    ]
    tenant.reset(token)
    await pond.publish_many("q", [])
    with pytest.raises(MillpondError):
        await pond.publish("q", 5, priority=1000)
    rows = await (await pond.transport).operations.find(ids)
    headers = {row.id: row.headers for row in rows}
    assert [headers[id_]["tenant"] for id_ in ids] == ["t-1"] * 4
    assert [headers[id_]["source"] for id_ in ids] == ["caller", *["middleware"] * 3]
    assert calls[:3] == [("q", 1, 1, None), ("q", 2, 2, None), ("q", 1, 1, None)]
    (failed,) = calls[3:]
    assert isinstance(failed[3], MillpondError) and failed[2] == 0


async def test_a_publish_middleware_without_a_yield_is_named() -> None:
    pond, seen = Millpond("memory://"), []

    @pond.publish_middleware
    def outer(publication: Publication) -> Any:
        seen.append(type((yield)))

    @pond.publish_middleware
    def returns_early(publication: Publication) -> Any:
        if not publication.transactional:
            return
        yield

    async with pond.testing() as test:
        with pytest.raises(MillpondError, match="returns_early ended without a yield; nothing was published"):
            await pond.publish("q", 1)
        assert await test.published("q") == []
    assert seen == [MillpondError]


async def test_an_interrupted_end_of_a_publish_middleware_ends_the_outer_one() -> None:
    pond, seen = Millpond("memory://"), []

    @pond.publish_middleware
    def outer(publication: Publication) -> Any:
        seen.append(type((yield)))

    @pond.publish_middleware
    def interrupted(publication: Publication) -> Any:
        yield
        raise asyncio.CancelledError

    async with pond.testing():
        with pytest.raises(asyncio.CancelledError):
            await pond.publish("q", 1)
    assert seen == [asyncio.CancelledError]


async def test_without_middleware_the_handler_is_called_as_ever() -> None:
    """The overhead is zero because the same code runs: no wrapper is made."""
    from millpond.worker.handler import Handler
    from millpond.worker.middleware import with_middleware

    async def handle(body: int) -> None: ...

    handler = Handler(handle, batch=False)
    assert with_middleware(handler, []) is handler and handler.takes_only_body


@pytest.mark.parametrize("kind", ["async", "thread"])
async def test_an_async_middleware_resets_its_variables(kind: str, caplog: pytest.LogCaptureFixture) -> None:
    pond, seen = Millpond("memory://"), []

    @pond.middleware
    async def around(handling: Handling) -> AsyncAround:
        token = tenant.set("t-1")
        yield
        tenant.reset(token)
        seen.append(tenant.get())

    if kind == "async":

        @pond.subscriber("q")
        async def handle(body: int) -> None:
            seen.append(tenant.get())
    else:

        @pond.subscriber("q")
        def handle_in_thread(body: int) -> None:
            seen.append(tenant.get())

    async with pond.testing() as test:
        await pond.publish("q", 1)
        assert await test.run() == 1
    assert seen == ["t-1", ""] and "failed after the handler" not in caplog.text
