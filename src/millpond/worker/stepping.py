"""Run a coroutine in its own context, without its own task."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Generator
from contextvars import Context
from typing import Any

from millpond.worker.delivery import Delivery, current, in_batch


def first_step(coroutine: Coroutine[Any, Any, Any], delivery: Delivery | None) -> Any:
    """Call this in the context. Returns the future that the coroutine awaits; raises StopIteration at its end.

    Without a delivery it is the handler of a batch.
    """
    current.set(delivery)
    if delivery is None:
        in_batch.set(True)
    return coroutine.send(None)


class RemainingSteps:
    """An awaitable for all steps after the first."""

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
            except GeneratorExit:  # we are closed, not the handler's doing
                run(self._coroutine.close)
                raise
            except BaseException as e:
                value, step = e, throw
            try:
                future = run(step, value)
            except StopIteration as stop:
                return stop.value
            except GeneratorExit as e:
                raise RuntimeError("the handler raised GeneratorExit") from e
