"""Threads for synchronous handlers.

They are daemons: a thread cannot be ended from outside, and a handler that hangs must not keep the program alive.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any

Call = tuple[asyncio.AbstractEventLoop, "asyncio.Future[Any]", Callable[[], Any]]


class Threads:
    """Threads for calls: as many as there were calls at once. An idle one waits for the next call."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._calls: SimpleQueue[Call | None] = SimpleQueue()
        self._threads = 0
        self._busy = 0

    def call(self, function: Callable[[], Any]) -> asyncio.Future[Any]:
        """Call the function in a thread. Shield the future: cancelling it would not end the thread."""
        loop = asyncio.get_running_loop()
        answer = loop.create_future()
        self._busy += 1
        if self._busy > self._threads:
            self._threads += 1
            threading.Thread(target=self._run, name=f"{self._name}-{self._threads}", daemon=True).start()
        self._calls.put((loop, answer, function))
        return answer

    def end(self) -> None:
        """End each thread after its present call."""
        for _ in range(self._threads):
            self._calls.put(None)

    def _run(self) -> None:
        while call := self._calls.get():
            loop, answer, function = call
            result: Any = None
            error: BaseException | None = None
            try:
                result = function()
            except (StopIteration, GeneratorExit) as e:  # the first cannot be in a future, the second ends coroutines
                error = RuntimeError(f"the handler raised {type(e).__name__}")
                error.__cause__ = e
            except BaseException as e:
                error = e
            try:
                loop.call_soon_threadsafe(self._answer, answer, result, error)
            except RuntimeError:  # the loop was closed: no caller waits
                return
            del call, loop, answer, function, result, error  # not kept alive until the next call

    def _answer(self, answer: asyncio.Future[Any], result: Any, error: BaseException | None) -> None:
        self._busy -= 1
        if answer.cancelled():
            return
        if error is None:
            answer.set_result(result)
        else:
            answer.set_exception(error)
            answer.exception()  # mark it as retrieved: an interrupted slot may never await it
