"""An operator cancels messages that run: the handler is interrupted, and the message is FAILED."""

import asyncio
import threading
from collections.abc import AsyncGenerator
from typing import Any

import pytest

from millpond import AckPolicy, Delivery, Handling, Millpond, NackMessage, State
from millpond.cli import run_command
from tests.waiting import until
from tests.worker.conftest import became, on, working


@on("sqlite", "postgresql", "mariadb")
async def test_an_async_handler_is_cancelled(pond: Millpond) -> None:
    seen: list[str] = []

    @pond.subscriber("q")
    async def handle(body: str) -> None:
        seen.append(body)
        try:
            if body == "long":
                await asyncio.Event().wait()
        except asyncio.CancelledError:
            seen.append("cancelled")
            raise

    id_ = await pond.publish("q", "long")
    other = await pond.publish("q", "short")
    workers = (await pond.transport).workers
    assert await workers.cancel([id_]) == []  # it waits: no worker holds it
    async with working(pond):
        await until(lambda: "long" in seen)
        assert await workers.cancel([id_, other], reason="not needed") in ([id_], [id_, other], [other, id_])
        row = await became(pond, id_, State.FAILED)
        await became(pond, other, State.COMPLETED)
        assert (row.reason, row.attempts) == ("not needed", 1)

        async def forgotten() -> bool:
            return await workers.cancel_requests() == {}

        await until(forgotten)
    assert seen.count("cancelled") == 1


@on("sqlite")
async def test_a_handler_in_a_thread_finds_the_mark(pond: Millpond) -> None:
    started, ended = threading.Event(), threading.Event()

    @pond.subscriber("q", max_workers=1)
    def handle(body: int, delivery: Delivery) -> None:
        started.set()
        while not delivery.interrupted:
            ended.wait(0.01)
        ended.set()

    id_ = await pond.publish("q", 1)
    async with working(pond):
        await until(started.is_set)
        assert await (await pond.transport).workers.cancel([id_]) == [id_]
        row = await became(pond, id_, State.FAILED)
        assert row.reason == "cancelled"
        await until(ended.is_set)


@on("sqlite")
@pytest.mark.parametrize(
    ("raised", "state", "reason"),
    [
        (ValueError("out of stock"), State.FAILED, "not needed"),
        (NackMessage(delay=600), State.RETRYABLE, None),
        (None, State.COMPLETED, None),
    ],
)
async def test_a_cancel_while_the_middleware_ends(
    pond: Millpond, raised: Exception | None, state: State, reason: str | None
) -> None:
    """An error is no decision: the message does not run again."""
    tears_down = asyncio.Event()

    @pond.middleware
    async def hangs(handling: Handling) -> AsyncGenerator[None, BaseException | None]:
        yield
        tears_down.set()
        await asyncio.Event().wait()

    @pond.subscriber("q")
    async def handle(body: int) -> None:
        if raised is not None:
            raise raised

    id_ = await pond.publish("q", 1)
    async with working(pond):
        await tears_down.wait()
        assert await (await pond.transport).workers.cancel([id_], reason="not needed") == [id_]
        row = await became(pond, id_, state)
    assert (row.reason, row.attempts) == (reason, 1)


@on("sqlite")
async def test_others_of_a_batch_and_decisions_stay(pond: Millpond) -> None:
    running = asyncio.Event()
    calls: list[Any] = []

    @pond.subscriber("q", batch=2, gather=5, max_workers=1)
    async def handle(bodies: list[str]) -> None:
        calls.append(bodies)
        if len(calls) == 1:
            running.set()
            await asyncio.Event().wait()

    @pond.subscriber("decided", ack_policy=AckPolicy.MANUAL)
    async def decide(body: int, delivery: Delivery) -> None:
        await delivery.ack()
        running.set()
        await asyncio.Event().wait()

    first, second = await pond.publish_many("q", ["a", "b"])
    workers = (await pond.transport).workers
    async with working(pond):
        await running.wait()
        assert await workers.cancel([first]) == [first]
        await became(pond, first, State.FAILED)
        await became(pond, second, State.COMPLETED)
        running.clear()
        done = await pond.publish("decided", 1)
        await running.wait()
        assert await workers.cancel([done]) == []
        pond.stop()
        pond.stop()
    assert calls == [["a", "b"], ["b"]]


@on("sqlite")
async def test_others_of_a_batch_wait_for_the_thread_that_has_them(pond: Millpond) -> None:
    started, end = threading.Event(), threading.Event()
    calls: list[list[str]] = []

    @pond.subscriber("q", batch=2, max_workers=2)
    def handle(bodies: list[str]) -> None:
        calls.append(bodies)
        if len(calls) == 1:
            started.set()
            end.wait(60)

    first, second = await pond.publish_many("q", ["a", "b"])
    async with working(pond):
        await until(started.is_set)
        assert await (await pond.transport).workers.cancel([first]) == [first]
        await became(pond, first, State.FAILED)
        await became(pond, await pond.publish("q", "c"), State.COMPLETED)
        assert calls == [["a", "b"], ["c"]]  # "b" does not run a second time while the thread has it
        end.set()
        await became(pond, second, State.COMPLETED)
    assert calls == [["a", "b"], ["c"], ["b"]]


@on("sqlite")
async def test_the_command_cancels_running_messages(
    pond: Millpond, url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    running = asyncio.Event()

    @pond.subscriber("q", max_workers=1)
    async def handle(body: int) -> None:
        running.set()
        await asyncio.Event().wait()

    id_ = await pond.publish("q", 1)
    later = await pond.publish("q", 2, delay=3600)
    arguments = ["cancel", str(id_), str(later), "--running", "--reason", "by hand", "--url", url]
    async with working(pond):
        await running.wait()
        assert await asyncio.to_thread(run_command, ["cancel", str(id_), "--url", url]) == 1
        assert "--running also cancels" in capsys.readouterr().err
        assert await asyncio.to_thread(run_command, arguments) == 0
        assert "1 cancelled, 1 running" in capsys.readouterr().out
        assert (await became(pond, id_, State.FAILED)).reason == "by hand"
        assert (await became(pond, later, State.FAILED)).reason == "by hand"
        assert await asyncio.to_thread(run_command, [*arguments[:2], "--running", "--url", url]) == 1
        assert "and none runs; millpond show ID prints its state" in capsys.readouterr().err
