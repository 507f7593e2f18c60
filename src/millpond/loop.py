"""Helpers for event loops: a loop in a thread, waits that a stop ends, growing pauses."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Collection, Coroutine, Iterable
from typing import Any, TypeVar

T = TypeVar("T")

_END_WITHIN = 5.0
"""Seconds that the tasks of a loop have to end when its thread ends."""


class LoopThread(threading.Thread):
    """An event loop in its own thread, which never keeps a program from ending."""

    def __init__(self) -> None:
        super().__init__(name="millpond-loop", daemon=True)
        self._loop = asyncio.new_event_loop()
        self.start()

    def run(self) -> None:
        self._loop.run_forever()
        self._loop.run_until_complete(_end_tasks(asyncio.all_tasks(self._loop)))
        self._loop.close()

    def wait_for(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    def end(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self.join()


async def _end_tasks(tasks: Collection[asyncio.Task[Any]]) -> None:
    """Cancel tasks and await their ends, which close connections. One that does not end is left."""
    for task in tasks:
        task.cancel()
    if tasks:
        await asyncio.wait(tasks, timeout=_END_WITHIN)
    await asyncio.sleep(0)  # closed connections leave the loop in its next round


class Backoff:
    """Pauses that double from `first` to `longest` seconds, until `reset`.

    >>> backoff = Backoff(1.0, 3.0)
    >>> [backoff.next() for _ in range(3)]
    [1.0, 2.0, 3.0]
    """

    def __init__(self, first: float, longest: float) -> None:
        self._first, self._longest = first, longest
        self._pause = first

    def next(self) -> float:
        pause = self._pause
        self._pause = min(pause * 2, self._longest)
        return pause

    def reset(self) -> None:
        self._pause = self._first


def running_loop() -> asyncio.AbstractEventLoop | None:
    """The event loop that runs in this thread, or None."""
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None


def outside_loop(work: Callable[[], T]) -> T:
    """Call `work` in this thread, or in a new one if this one runs an event loop, as in a notebook."""
    if running_loop() is None:
        return work()
    from concurrent.futures import ThreadPoolExecutor  # loads more modules, for few calls

    with ThreadPoolExecutor(1, "millpond-outside-loop") as pool:
        return pool.submit(work).result()


async def gather_all(work: Iterable[Awaitable[T]]) -> list[T]:
    """Await all in parallel, each to its end; then raise the first error, if any."""
    done: list[T] = []
    for result in await asyncio.gather(*work, return_exceptions=True):
        if isinstance(result, BaseException):
            raise result
        done.append(result)
    return done


async def until_stopped(stop: asyncio.Event, work: Coroutine[Any, Any, T]) -> T | None:
    """The result of `work`, or None: a stop cancels it, and its end is awaited."""
    if stop.is_set():
        work.close()
        return None
    working, stopping = asyncio.ensure_future(work), asyncio.ensure_future(stop.wait())
    try:
        await asyncio.wait([working, stopping], return_when=asyncio.FIRST_COMPLETED)
    finally:
        stopping.cancel()
        if not working.done():
            working.cancel()
            await asyncio.wait([working])
    return None if working.cancelled() else working.result()
