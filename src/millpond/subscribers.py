"""Subscribers: handlers and the queues they serve, declared in one module or in many."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

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
            self.subscriptions.append(subscription(queues, handler, options))
            return handler

        return declare

    def include(self, others: Subscribers) -> None:
        """Take over the subscribers that another module declared."""
        self.subscriptions.extend(others.subscriptions)

    def of_queues(self, queues: Sequence[str] | None) -> list[Subscription]:
        """Those that serve any of these queues; all of them if none is named."""
        if queues is None:
            return list(self.subscriptions)
        return [s for s in self.subscriptions if set(queues) & set(s.queues)]
