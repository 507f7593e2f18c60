"""Subscribers: handlers and the queues they serve, declared in one module or in many."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import msgspec

from millpond.errors import InvalidOption
from millpond.worker import Subscription, subscription

H = TypeVar("H", bound=Callable[..., Any])


class Subscribers:
    """A list of subscribers. A pond is one; others can be included in it.

    >>> orders = Subscribers()
    >>> @orders.subscriber("orders", max_workers=4)
    ... async def ship(order: dict) -> None: ...
    >>> orders.subscriptions[0].queues
    ('orders',)
    """

    def __init__(self) -> None:
        self.subscriptions: list[Subscription] = []

    def subscriber(self, *queues: str, **options: Any) -> Callable[[H], H]:
        """Let a function handle the messages of these queues; see docs/reference/subscriber.md for the options.

        The function itself stays as it is, so that tests can call it.
        """

        def declare(handler: H) -> H:
            self._add(subscription(queues, handler, options))
            return handler

        return declare

    def include(self, others: Subscribers) -> None:
        """Take over the subscribers that another module declared."""
        for other in others.subscriptions:
            self._add(other)

    def of_queues(self, queues: Sequence[str] | None) -> list[Subscription]:
        """Those that serve these queues, as far as they do; all of them if no queue is named."""
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

    def _add(self, new: Subscription) -> None:
        for s in self.subscriptions:
            for queue in set(s.queues) & set(new.queues):
                raise InvalidOption(
                    f"the queue {queue!r} has a subscriber already, {s.name}: each of its messages would go to one "
                    "of the two by chance"
                )
        self.subscriptions.append(new)
