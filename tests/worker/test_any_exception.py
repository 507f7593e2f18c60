"""Any exception of a handler or a decoder is a failed attempt of its message alone; the worker goes on."""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from millpond import Millpond, Retry, State
from tests.waiting import SOON
from tests.worker.conftest import became, on, row, working


class PanicException(BaseException):
    """A panic of a Rust extension, as pyo3 defines it."""


TEXT = "called `Option::unwrap()` on a `None` value"


async def raise_at_once(body: Any) -> None:
    if body == "panic":
        raise PanicException(TEXT)


async def raise_after_a_wait(body: Any) -> None:
    await asyncio.sleep(0)
    if body == "panic":
        raise PanicException(TEXT)


def raise_in_a_thread(body: Any) -> None:
    if body == "panic":
        raise PanicException(TEXT)


async def raise_for_a_batch(bodies: list[Any]) -> None:
    if "panic" in bodies:
        raise PanicException(TEXT)


HANDLERS: list[Callable[..., Any]] = [raise_at_once, raise_after_a_wait, raise_in_a_thread, raise_for_a_batch]


@pytest.mark.parametrize("handler", HANDLERS)
async def test_a_panic_of_a_handler_is_a_failed_attempt(pond: Millpond, handler: Callable[..., Any]) -> None:
    batch = {"batch": 1} if handler is raise_for_a_batch else {}
    pond.subscriber("q", max_workers=1, retry=Retry.constant(60), **batch)(handler)
    async with working(pond):
        bad = await became(pond, await pond.publish("q", "panic"), State.RETRYABLE)
        await became(pond, await pond.publish("q", "healthy"), State.COMPLETED)
    assert (bad.deliveries, bad.attempts) == (1, 1)
    assert bad.error == f"PanicException: {TEXT}"


RAISED: list[BaseException] = [
    BaseExceptionGroup("several", [PanicException(TEXT), ValueError("no carrier")]),
    GeneratorExit(),
    StopAsyncIteration(),
    SystemExit(3),
    asyncio.CancelledError(),
]


@on("memory")
@pytest.mark.parametrize("error", RAISED, ids=lambda error: type(error).__name__)
@pytest.mark.parametrize("kind", ["at once", "after a wait", "in a thread"])
async def test_other_exceptions_outside_exception(pond: Millpond, error: BaseException, kind: str) -> None:
    """GeneratorExit must not look like the end of the worker's own coroutine."""

    async def handle(body: str) -> None:
        if kind == "after a wait":
            await asyncio.sleep(0)
        if body == "bad":
            raise error

    def handle_in_a_thread(body: str) -> None:
        if body == "bad":
            raise error

    handler = handle_in_a_thread if kind == "in a thread" else handle
    pond.subscriber("q", max_workers=1, retry=Retry.constant(60))(handler)
    async with working(pond):
        bad = await became(pond, await pond.publish("q", "bad"), State.RETRYABLE)
        await became(pond, await pond.publish("q", "healthy"), State.COMPLETED)
    assert type(error).__name__ in (bad.error or "")


class Panics:
    """A type whose decoder panics, as a pydantic model's may."""

    @classmethod
    def model_validate_json(cls, payload: bytes) -> str:
        if payload == b"panic":
            raise PanicException(TEXT)
        return payload.decode()


@pytest.mark.parametrize("batch", [None, 10])
async def test_a_panic_of_a_decoder_fails_its_message_alone(pond: Millpond, batch: int | None) -> None:
    got: list[Any] = []

    async def one(body: Panics) -> None:
        got.append(body)

    async def many(bodies: list[Panics]) -> None:
        got.extend(bodies)

    pond.subscriber("q", batch=batch)(one if batch is None else many)
    ids = await pond.publish_many("q", ["a", "panic", "b"])
    async with working(pond):
        found = [await became(pond, id_, State.COMPLETED) for id_ in (ids[0], ids[2])]
        bad = await became(pond, ids[1], State.FAILED)
    assert sorted(got) == ["a", "b"]
    assert (bad.reason, bad.error) == ("undecodable body", f"PanicException: {TEXT}")
    assert [r.attempts for r in found] == [1, 1]


@on("memory")
async def test_an_error_without_a_text_of_its_own_is_a_failed_attempt(pond: Millpond) -> None:
    """The text of an error comes from its author too."""

    class Mute(Exception):
        def __str__(self) -> str:
            raise PanicException(TEXT)

    @pond.subscriber("q", max_workers=1, retry=Retry.constant(60))
    async def handle(body: str) -> None:
        if body == "bad":
            raise Mute

    bad, good = await pond.publish_many("q", ["bad", "healthy"])
    async with working(pond):
        await became(pond, good, State.COMPLETED)
    assert (await row(pond, bad)).attempts == 1


@on("memory")
@pytest.mark.parametrize("kind", ["at once", "after a wait", "in a thread"])
def test_a_keyboard_interrupt_ends_the_run(url: str, kind: str) -> None:
    """It is meant for the program, not for one message."""

    async def handle(body: int) -> None:
        if kind == "after a wait":
            await asyncio.sleep(0)
        raise KeyboardInterrupt

    def handle_in_a_thread(body: int) -> None:
        raise KeyboardInterrupt

    async def run() -> None:
        pond = Millpond(url)
        pond.subscriber("q")(handle_in_a_thread if kind == "in a thread" else handle)
        await pond.publish("q", 1)
        try:
            async with asyncio.timeout(SOON):
                await pond.run(signals=False)
        finally:
            await pond.close()

    with pytest.raises(KeyboardInterrupt):
        asyncio.run(run())
