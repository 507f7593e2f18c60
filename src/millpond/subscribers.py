"""Subscribers: handlers and their queues, declared in one module or in several."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Unpack, overload

import msgspec

from millpond.clock import Seconds
from millpond.errors import InvalidOption
from millpond.message import DEFAULT_PRIORITY, encode_headers
from millpond.publishing import message_of
from millpond.subscriber import Declare, DeclareBatch, Publishes, Subscriber
from millpond.worker import SubscriberOptions, Subscription, subscription

if TYPE_CHECKING:
    from millpond.schedule import Missed, Periodic


class Subscribers:
    """A list of subscribers. A pond is one and can include others.

    >>> orders = Subscribers()
    >>> @orders.subscriber("orders", max_workers=4)
    ... async def ship(order: dict) -> None: ...
    >>> orders.subscriptions[0].queues
    ('orders',)
    """

    def __init__(self) -> None:
        self.subscriptions: list[Subscription] = []
        self.periodics: list[Periodic] = []
        self._included_in: Subscribers | None = None

    @overload
    def subscriber(self, *queues: str, batch: int, **options: Unpack[SubscriberOptions]) -> DeclareBatch: ...

    @overload
    def subscriber(self, *queues: str, batch: None = None, **options: Unpack[SubscriberOptions]) -> Declare: ...

    def subscriber(self, *queues: str, batch: int | None = None, **options: Unpack[SubscriberOptions]) -> Any:
        """Declare a function as the handler of these queues; docs/reference/subscriber.md lists the options.

        The result is called like the function itself, and has `publish`, which sends a message to this handler.
        """
        if not queues or not all(isinstance(queue, str) for queue in queues):
            raise InvalidOption('a subscriber needs the name of its queue, as text: @pond.subscriber("orders")')
        given: dict[str, Any] = {**options} if batch is None else {"batch": batch, **options}

        def declare(handler: Callable[..., Any]) -> Subscriber[Any, ..., Any]:
            function = handler.function if isinstance(handler, Subscriber) else handler
            new = subscription(queues, function, given)
            self._add(new)
            return Subscriber(function, new.queues, self._publisher)

        return declare

    def every(
        self,
        schedule: str | Seconds | None = None,
        *,
        queue: str,
        every: Seconds | None = None,
        timezone: str = "UTC",
        missed: Missed = "once",
        name: str | None = None,
        body: Any = None,
        priority: int = DEFAULT_PRIORITY,
        headers: Mapping[str, Any] | None = None,
        **options: Unpack[SubscriberOptions],
    ) -> Declare:
        """Publish a message at the times of a schedule: a cron expression, or an interval (`every=timedelta(…)`).

        As a decorator it makes the function the subscriber of the queue, with these options. Workers publish; each time
        is published once, however many there are. `missed`: times that passed while no worker ran are skipped,
        published once, or all. The schedule is stored in the database under `name`, by default the queue, where
        `millpond periodic` shows, changes and pauses it.
        """
        from millpond.schedule import Periodic  # only for programs with schedules
        from millpond.schedule import every as interval

        times = every if schedule is None else schedule
        if times is None or (schedule is not None and every is not None):
            raise InvalidOption("give a cron expression, or every=timedelta(…)")
        message = message_of(queue, body, headers=headers)
        periodic = Periodic(
            name=name or queue,
            queue=queue,
            schedule=times if isinstance(times, str) else interval(times),
            timezone=timezone,
            missed=missed,
            priority=priority,
            payload=message.payload,
            headers=encode_headers(message.headers),
        )
        self._add_periodic(periodic)
        return self.subscriber(queue, **options)

    def _publisher(self) -> Publishes | None:
        """The pond that publishes for these subscribers; None: they were not included in one yet."""
        return None if self._included_in is None else self._included_in._publisher()

    def include(self, others: Subscribers) -> None:
        """Add the subscribers and periodic messages that another module declared."""
        for other in others.subscriptions:
            self._add(other)
        for periodic in others.periodics:
            self._add_periodic(periodic)
        others._included_in = self

    def of_queues(self, queues: Sequence[str] | None) -> list[Subscription]:
        """Subscriptions to these queues, reduced to them; all subscriptions if `queues` is None."""
        if queues is None:
            return list(self.subscriptions)
        if isinstance(queues, str):
            raise InvalidOption(f"queues must be a list of names, not the text {queues!r}")
        served = {queue for s in self.subscriptions for queue in s.queues}
        for queue in queues:
            if queue not in served:
                there = ", ".join(sorted(served)) or "none"
                raise InvalidOption(f"no subscriber serves the queue {queue!r}; those served are: {there}")
        chosen = [(s, tuple(queue for queue in s.queues if queue in queues)) for s in self.subscriptions]
        return [msgspec.structs.replace(s, queues=names) for s, names in chosen if names]

    def _add_periodic(self, new: Periodic) -> None:
        if any(other.name == new.name for other in self.periodics):
            raise InvalidOption(f"there is a periodic message {new.name!r} already; give this one another name")
        self.periodics.append(new)

    def _add(self, new: Subscription) -> None:
        for s in self.subscriptions:
            for queue in set(s.queues) & set(new.queues):
                raise InvalidOption(
                    f"the queue {queue!r} has a subscriber already, {s.name}: each of its messages would go to one "
                    "of the two by chance"
                )
        self.subscriptions.append(new)
