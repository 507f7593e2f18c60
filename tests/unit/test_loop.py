"""Waits that a stop ends, and pauses that grow."""

import asyncio
import inspect

import pytest

from millpond.loop import Backoff, LoopThread, running_loop, until_stopped


async def test_until_stopped_returns_the_result() -> None:
    assert await until_stopped(asyncio.Event(), asyncio.sleep(0, "done")) == "done"


async def test_until_stopped_raises_the_error_of_the_work() -> None:
    async def fail() -> None:
        raise ValueError("why")

    with pytest.raises(ValueError, match="why"):
        await until_stopped(asyncio.Event(), fail())


async def test_a_stop_cancels_the_work_and_waits_for_its_end() -> None:
    stop, started, ended = asyncio.Event(), asyncio.Event(), False

    async def work() -> None:
        nonlocal ended
        started.set()
        try:
            await asyncio.sleep(60)
        finally:
            await asyncio.sleep(0)
            ended = True

    waiting = asyncio.create_task(until_stopped(stop, work()))
    await started.wait()
    stop.set()
    assert await waiting is None
    assert ended


async def test_after_a_stop_the_work_does_not_begin() -> None:
    stop = asyncio.Event()
    stop.set()
    work = asyncio.sleep(60)
    assert await until_stopped(stop, work) is None
    assert inspect.getcoroutinestate(work) == inspect.CORO_CLOSED


async def test_cancelling_the_wait_cancels_the_work() -> None:
    cancelled = asyncio.Event()

    async def work() -> None:
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            cancelled.set()
            raise

    waiting = asyncio.create_task(until_stopped(asyncio.Event(), work()))
    await asyncio.sleep(0.01)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert cancelled.is_set()


def test_pauses_double_up_to_the_longest_until_a_reset() -> None:
    backoff = Backoff(0.1, 0.3)
    assert [backoff.next() for _ in range(3)] == [0.1, 0.2, 0.3]
    backoff.reset()
    assert backoff.next() == 0.1


def test_no_loop_runs_here() -> None:
    assert running_loop() is None


def test_a_loop_thread_that_ends_lets_its_tasks_clean_up() -> None:
    thread, ended = LoopThread(), []

    async def background() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)
            ended.append("clean")

    async def start() -> asyncio.Task[None]:
        task = asyncio.create_task(background())
        await asyncio.sleep(0)
        return task

    task = thread.wait_for(start())
    thread.end()
    assert ended == ["clean"]
    assert task.cancelled()
