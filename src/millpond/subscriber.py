"""A subscriber: the handler, as the decorator returns it, which can publish its own messages."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable
from typing import Any, Concatenate, Generic, ParamSpec, Protocol, TypeVar, Unpack, overload

from millpond.errors import InvalidOption
from millpond.ids import PublishedId
from millpond.publishing import Publish, PublishManyOptions, PublishOptions

B = TypeVar("B")
P = ParamSpec("P")
R = TypeVar("R")


class Publishes(Protocol):
    """The part of a pond that a subscriber needs."""

    async def publish(self, queue: str, body: Any, **options: Unpack[PublishOptions]) -> PublishedId: ...

    async def publish_many(
        self, queue: str, bodies: Iterable[Any], **options: Unpack[PublishManyOptions]
    ) -> list[PublishedId]: ...

    def publish_sync(self, queue: str, body: Any, **options: Unpack[PublishOptions]) -> PublishedId: ...

    def publish_many_sync(
        self, queue: str, bodies: Iterable[Any], **options: Unpack[PublishManyOptions]
    ) -> list[PublishedId]: ...


class Subscriber(Generic[B, P, R]):
    """A declared handler. A call runs the function itself; `publish` sends it a message.

    The type of the body is that of the handler's first parameter; of the list's items for a batch handler.
    """

    def __init__(self, function: Callable[P, R], queues: tuple[str, ...], publisher: Callable[[], Publishes | None]):
        functools.update_wrapper(self, function)
        self.function = function
        """The function that was decorated."""
        self.queues = queues
        self._publisher = publisher
        if inspect.iscoroutinefunction(function) and hasattr(inspect, "markcoroutinefunction"):
            inspect.markcoroutinefunction(self)

    def __repr__(self) -> str:
        name = getattr(self.function, "__qualname__", repr(self.function))
        return f"<Subscriber {name} of {', '.join(self.queues)}>"

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        return self.function(*args, **kwargs)

    @property
    def queue(self) -> str:
        """The queue to which `publish` publishes: the first one."""
        return self.queues[0]

    async def publish(self, body: B, **options: Unpack[PublishOptions]) -> PublishedId:
        """Publish a body to this subscriber's queue, with the options of `pond.publish`."""
        return await self._pond.publish(self.queue, body, **options)

    async def publish_many(
        self, bodies: Iterable[B | Publish[B]], **options: Unpack[PublishManyOptions]
    ) -> list[PublishedId]:
        """Publish many bodies, with the options of `pond.publish_many`."""
        return await self._pond.publish_many(self.queue, bodies, **options)

    def publish_sync(self, body: B, **options: Unpack[PublishOptions]) -> PublishedId:
        """`publish` for synchronous code."""
        return self._pond.publish_sync(self.queue, body, **options)

    def publish_many_sync(
        self, bodies: Iterable[B | Publish[B]], **options: Unpack[PublishManyOptions]
    ) -> list[PublishedId]:
        """`publish_many` for synchronous code."""
        return self._pond.publish_many_sync(self.queue, bodies, **options)

    @property
    def _pond(self) -> Publishes:
        publisher = self._publisher()
        if publisher is None:
            raise InvalidOption(f"{self!r} belongs to no pond yet: call pond.include(…) with its Subscribers first")
        return publisher


class Declare(Protocol):
    """The decorator for a handler of single messages."""

    @overload
    def __call__(self, handler: Callable[[], R]) -> Subscriber[Any, [], R]: ...

    @overload
    def __call__(self, handler: Callable[Concatenate[B, P], R]) -> Subscriber[B, Concatenate[B, P], R]: ...


class DeclareBatch(Protocol):
    """The decorator for a handler of lists."""

    def __call__(self, handler: Callable[Concatenate[list[B], P], R]) -> Subscriber[B, Concatenate[list[B], P], R]: ...
