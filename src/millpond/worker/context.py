"""Coroutines that run in a context of their own, without a task of their own."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Generator
from contextvars import Context
from typing import Any

from millpond.worker.delivery import Delivery, current


def begin(coroutine: Coroutine[Any, Any, Any], delivery: Delivery | None) -> Any:
    """The first step, to be called in the context: what the coroutine waits for, or StopIteration at its end."""
    current.set(delivery)
    return coroutine.send(None)


class Rest:
    """All steps after the first."""

    __slots__ = ("_context", "_coroutine", "_future")

    def __init__(self, coroutine: Coroutine[Any, Any, Any], context: Context, future: Any) -> None:
        self._coroutine = coroutine
        self._context = context
        self._future = future

    def __await__(self) -> Generator[Any, Any, Any]:
        run, send, throw, future = self._context.run, self._coroutine.send, self._coroutine.throw, self._future
        step: Callable[..., Any]
        while True:
            try:
                value = yield future
                step = send
            except BaseException as e:
                value, step = e, throw
            try:
                future = run(step, value)
            except StopIteration as stop:
                return stop.value
