"""Threads for synchronous handlers.

Daemons: nothing can end a thread from outside, and a handler that hangs must not keep the program from ending.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any

Call = tuple[asyncio.AbstractEventLoop, "asyncio.Future[Any]", Callable[[], Any]]


class Threads:
    """As many threads as there are calls at once; they wait for the next call when one is done."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._calls: SimpleQueue[Call | None] = SimpleQueue()
        self._threads = 0
        self._busy = 0

    def call(self, function: Callable[[], Any]) -> asyncio.Future[Any]:
        """Call the function in a thread. To be shielded: cancelling the answer would not end the thread."""
        loop = asyncio.get_running_loop()
        answer = loop.create_future()
        self._busy += 1
        if self._busy > self._threads:
            self._threads += 1
            threading.Thread(target=self._run, name=f"{self._name}-{self._threads}", daemon=True).start()
        self._calls.put((loop, answer, function))
        return answer

    def end(self) -> None:
        """Let the threads end when they have done what they are at."""
        for _ in range(self._threads):
            self._calls.put(None)

    def _run(self) -> None:
        while call := self._calls.get():
            loop, answer, function = call
            result: Any = None
            error: BaseException | None = None
            try:
                result = function()
            except StopIteration as e:  # which no future can carry
                error = RuntimeError("the handler raised StopIteration")
                error.__cause__ = e
            except BaseException as e:
                error = e
            try:
                loop.call_soon_threadsafe(self._answer, answer, result, error)
            except RuntimeError:  # the loop was closed: nobody waits any more
                return
            del call, loop, answer, function, result, error  # not kept until the next call

    def _answer(self, answer: asyncio.Future[Any], result: Any, error: BaseException | None) -> None:
        self._busy -= 1
        if answer.cancelled():
            return
        if error is None:
            answer.set_result(result)
        else:
            answer.set_exception(error)
            answer.exception()  # seen: an interrupted runner may never ask
