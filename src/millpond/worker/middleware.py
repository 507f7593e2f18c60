"""Middleware: functions that run around each message, in the context of its handler.

A middleware is a generator, plain or async, with one `yield`. It runs up to the `yield` before the handler, and to
its end afterwards; the `yield` returns the handler's exception, or None. The exception is passed, not raised:
no middleware can change the outcome.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections.abc import AsyncGenerator, Callable, Coroutine, Generator, Iterator, Mapping, Sequence
from contextvars import Context, copy_context
from typing import Any, TypeVar
from uuid import UUID

import msgspec

from millpond.errors import InvalidOption, MillpondError
from millpond.message import Claim, Message
from millpond.outcome import Outcome, Raised, Returned
from millpond.worker.delivery import Delivery
from millpond.worker.handler import Handler
from millpond.worker.subscription import handler_name

log = logging.getLogger("millpond.worker")

Plain = Generator[None, BaseException | None, None]
Async = AsyncGenerator[None, BaseException | None]
Middleware = Callable[["Handling"], Plain | Async]
M = TypeVar("M", bound=Callable[..., Any])

_CHECK_EVERY = 0.2
"""Seconds between two checks whether a call that waits for the event loop was interrupted."""


class Handling:
    """One delivery as a middleware reads it: it can add headers, and decide nothing."""

    __slots__ = ("_delivery", "batch", "handler", "is_async")

    def __init__(self, delivery: Delivery, handler: str, batch: int, is_async: bool) -> None:
        self._delivery = delivery
        self.handler = handler
        """Name of the handler."""
        self.batch = batch
        """Number of messages in this call of the handler; 1 for a handler of single messages."""
        self.is_async = is_async
        """False: the handler runs in a thread."""

    def __repr__(self) -> str:
        return f"<Handling {self.id} of {self.queue!r} by {self.handler}, attempt {self.attempt}>"

    @property
    def message(self) -> Message:
        return self._delivery.claim.message

    @property
    def claim(self) -> Claim:
        return self._delivery.claim

    @property
    def id(self) -> UUID:
        return self._delivery.id

    @property
    def queue(self) -> str:
        return self._delivery.queue

    @property
    def headers(self) -> Mapping[str, Any]:
        return self._delivery.claim.message.headers

    @property
    def attempt(self) -> int:
        return self._delivery.attempt

    @property
    def redelivered(self) -> bool:
        return self._delivery.redelivered

    @property
    def correlation_id(self) -> str:
        return self._delivery.correlation_id

    @property
    def decided(self) -> Outcome | None:
        """The decision that the handler made by hand, if any."""
        return self._delivery.decided

    @property
    def lost(self) -> bool:
        return self._delivery.lost

    @property
    def interrupted(self) -> bool:
        """The handler exceeded its timeout, was cancelled, or the worker stops."""
        return self._delivery.interrupted

    def add_headers(self, headers: Mapping[str, Any]) -> None:
        """Add headers for the handler and for later middleware. The stored message keeps its own."""
        claim = self._delivery.claim
        message = msgspec.structs.replace(claim.message, headers={**claim.message.headers, **headers})
        self._delivery.claim = msgspec.structs.replace(claim, message=message)


def check_middleware(function: Any) -> None:
    """Raise unless the function is a generator, plain or async."""
    if not (inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function)):
        raise InvalidOption(
            f"{handler_name(function)} is no generator: a middleware has one yield, at which the handler runs"
        )


def with_middleware(handler: Handler, middleware: Sequence[Middleware]) -> Handler:
    """The handler with middleware around each call; the handler itself if there is none."""
    return _HandlerWithin(handler, middleware) if middleware else handler


class _HandlerWithin(Handler):
    """A handler whose only argument is its delivery, or deliveries. Arguments are filled after the set-up."""

    def __init__(self, inner: Handler, middleware: Sequence[Middleware]) -> None:
        self._inner = inner
        self._middleware = tuple(middleware)
        self._name = handler_name(inner.function)
        self.batch = inner.batch
        self.is_async = inner.is_async
        self.decode = inner.decode
        self.takes_only_body = False
        self.function = self._run_async if inner.is_async else self._run_in_thread

    def arguments(self, body: Any, delivery: Delivery | Sequence[Delivery]) -> list[Any]:
        return [delivery]

    def _handlings(self, delivered: Any) -> Iterator[Handling]:
        deliveries = delivered if self.batch else (delivered,)
        return (Handling(delivery, self._name, len(deliveries), self.is_async) for delivery in deliveries)

    def _inner_arguments(self, delivered: Any) -> list[Any]:
        body = [delivery.body for delivery in delivered] if self.batch else delivered.body
        return self._inner.arguments(body, delivered)

    def _record(self, delivered: Any, result: Returned | Raised) -> None:
        """Record the result, unless the handler was interrupted."""
        for delivery in delivered if self.batch else (delivered,):
            if not delivery.interrupted:
                delivery.result = result

    async def _run_async(self, delivered: Any) -> None:
        entered: list[Plain | Async] = []
        try:
            try:
                for handling in self._handlings(delivered):
                    for function in self._middleware:
                        made = function(handling)
                        if isinstance(made, AsyncGenerator):
                            await _set_up_async(made, function)
                        else:
                            _set_up(made, function)
                        entered.append(made)
                await self._inner.function(*self._inner_arguments(delivered))
            except GeneratorExit:
                raise
            except BaseException as e:
                self._record(delivered, Raised(e))
                await _tear_down_all_async(entered, e)
                raise
            self._record(delivered, Returned())
            await _tear_down_all_async(entered, None)
        except GeneratorExit:  # this coroutine is closed: it cannot wait for an async middleware
            for one in reversed(entered):
                if not isinstance(one, AsyncGenerator):
                    one.close()
            raise

    def _run_in_thread(self, delivered: Any) -> Any:
        deliveries: Sequence[Delivery] = delivered if self.batch else (delivered,)
        in_loop = _InLoop(deliveries[0])
        entered: list[Plain | Async] = []

        def tear_down(error: BaseException | None) -> None:
            interruption: BaseException | None = None
            while entered:
                one = entered.pop()
                try:
                    if isinstance(one, AsyncGenerator):
                        in_loop(_tear_down_async(one, error))
                    else:
                        _tear_down(one, error)
                except BaseException as e:
                    interruption, error = interruption or e, e
            if interruption is not None:
                raise interruption

        try:
            for handling in self._handlings(delivered):
                for function in self._middleware:
                    made = function(handling)
                    if isinstance(made, AsyncGenerator):
                        in_loop(_set_up_async(made, function))
                    else:
                        _set_up(made, function)
                    entered.append(made)
            value = self._inner.function(*self._inner_arguments(delivered))
            if inspect.iscoroutine(value):  # a decorator hid that the function is async
                value = in_loop(value)
        except BaseException as e:
            self._record(delivered, Raised(e))
            tear_down(e)
            raise
        self._record(delivered, Returned())
        tear_down(None)
        return value


def _set_up(made: Plain, function: Middleware) -> None:
    try:
        next(made)
    except StopIteration:
        raise _no_yield(function) from None


async def _set_up_async(made: Async, function: Middleware) -> None:
    try:
        await anext(made)
    except StopAsyncIteration:
        raise _no_yield(function) from None


def _no_yield(function: Middleware) -> MillpondError:
    return MillpondError(f"the middleware {handler_name(function)} ended without a yield, so its message did not run")


def _tear_down(made: Plain, error: BaseException | None) -> None:
    """Run a middleware to its end. Its errors are logged: the result of the handler is already known."""
    try:
        made.send(error)
    except StopIteration:
        return
    except KeyboardInterrupt:
        raise
    except BaseException as e:
        _log_failure(made, e, error)
        return
    made.close()
    log.error("the middleware %s yields twice; its second yield is ignored", _name(made))


async def _tear_down_async(made: Async, error: BaseException | None) -> None:
    try:
        await made.asend(error)
    except StopAsyncIteration:
        return
    except (KeyboardInterrupt, asyncio.CancelledError, GeneratorExit) as e:
        if e is not error:
            raise
        return
    except BaseException as e:
        _log_failure(made, e, error)
        return
    await made.aclose()
    log.error("the middleware %s yields twice; its second yield is ignored", _name(made))


async def _tear_down_all_async(entered: list[Plain | Async], error: BaseException | None) -> None:
    """Run all of them to their ends. An interruption, such as a timeout, is passed to the next ones and raised last."""
    interruption: BaseException | None = None
    while entered:
        one = entered.pop()
        try:
            if isinstance(one, AsyncGenerator):
                await _tear_down_async(one, error)
            else:
                _tear_down(one, error)
        except GeneratorExit:
            raise
        except BaseException as e:
            interruption, error = interruption or e, e
    if interruption is not None:
        raise interruption


def _log_failure(made: Any, raised: BaseException, error: BaseException | None) -> None:
    if raised is not error:  # a middleware that raises the handler's error again has no effect
        log.error("the middleware %s failed after the handler", _name(made), exc_info=raised)


def _name(made: Any) -> str:
    return str(getattr(made, "__qualname__", type(made).__name__))


class _InLoop:
    """Runs coroutines of one call in the worker's event loop, with the context variables of this thread.

    All of them share one context: a token that the set-up of a middleware keeps is valid in its tear-down.
    """

    def __init__(self, delivery: Delivery) -> None:
        self._delivery = delivery
        self._loop = delivery._settler.loop
        self._context: Context | None = None

    def __call__(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        """Run it to its end, and take over its changes of variables."""
        if self._context is None:
            self._context = copy_context()
        context = self._context
        for variable, value in copy_context().items():
            if variable not in context or context[variable] is not value:
                context.run(variable.set, value)
        done = asyncio.run_coroutine_threadsafe(_until_interrupted(coroutine, context, self._delivery), self._loop)
        try:
            return done.result()
        finally:
            here = copy_context()
            for variable in context:
                value = context[variable]
                if variable not in here or here[variable] is not value:
                    variable.set(value)


async def _until_interrupted(coroutine: Coroutine[Any, Any, Any], context: Context, delivery: Delivery) -> Any:
    """Run it in the context, and cancel it if the delivery is interrupted meanwhile: its thread waits for it."""
    task = asyncio.get_running_loop().create_task(coroutine, context=context)
    before = delivery.interrupted
    try:
        while not (await asyncio.wait([task], timeout=_CHECK_EVERY))[0]:
            if delivery.interrupted and not before and not task.cancelling():
                task.cancel()
    except asyncio.CancelledError:
        task.cancel()
        raise
    return task.result()
