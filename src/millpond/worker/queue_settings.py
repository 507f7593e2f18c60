"""The settings of a worker's queues, read again twice a second; a subscriber's own options replace them."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence

import msgspec

from millpond.clock import seconds
from millpond.errors import Closed, MillpondError
from millpond.seam.settings import QueueSettings
from millpond.seam.transport import Capability, Transport
from millpond.worker.subscription import Subscription

log = logging.getLogger("millpond.worker")

_READ_EVERY = 0.5
_OPTIONS = ("lease", "retry", "max_crashes", "max_deliveries")


class Settings:
    """What holds for each queue: `of(subscription, queue)` is the subscription with the settings of that queue."""

    def __init__(self, subscriptions: Sequence[Subscription] = ()) -> None:
        self._open = [s for s in subscriptions if not s.own.issuperset(_OPTIONS)]
        self._queues = sorted({queue for s in self._open for queue in s.queues})
        self._settings: dict[str, QueueSettings] = {}
        self._failed = False
        self._known: dict[tuple[tuple[str, ...], str], Subscription] = {}
        self._shortest: dict[tuple[str, ...], Subscription] = {}

    def of(self, s: Subscription, queue: str) -> Subscription:
        return self._known.get((s.queues, queue), s)

    def alike(self, s: Subscription) -> list[tuple[Subscription, tuple[str, ...]]]:
        """The queues of a subscription, grouped by the options of a claim."""
        if not any(queue in self._settings for queue in s.queues):
            return [(s, s.queues)]
        groups: dict[tuple[object, ...], tuple[Subscription, tuple[str, ...]]] = {}
        for queue in s.queues:
            one = self.of(s, queue)
            key = (one.lease, one.max_deliveries)
            first, names = groups.get(key, (one, ()))
            groups[key] = (first, (*names, queue))
        return list(groups.values())

    def shortest(self, s: Subscription) -> Subscription:
        """The subscription as it is for that one of its queues which has the shortest lease. Any thread may call it."""
        return self._shortest.get(s.queues, s)

    async def read(self, transport: Transport) -> None:
        """Read them once. After an error the last ones hold."""
        if not self._queues or Capability.SETTINGS not in transport.capabilities:
            return
        try:
            read = await transport.operations.settings(self._queues)
            self._follow({one.queue: one for one in read if one != QueueSettings(queue=one.queue)})
        except Exception as e:
            if not self._failed and not isinstance(e, Closed):  # once, not twice a second
                trace = None if isinstance(e, MillpondError) else e
                log.warning("settings of queues cannot be read, the last ones hold: %s", e, exc_info=trace)
            self._failed = True
            return
        self._failed = False

    def _follow(self, found: dict[str, QueueSettings]) -> None:
        if found == self._settings:
            return
        known = {
            (s.queues, queue): with_settings(s, found[queue])
            for s in self._open
            for queue in s.queues
            if queue in found
        }
        shortest = {
            s.queues: min((known.get((s.queues, q), s) for q in s.queues), key=lambda one: seconds(one.lease))
            for s in self._open
        }
        self._settings, self._known, self._shortest = found, known, shortest

    async def run(self, transport: Transport) -> None:
        """Read until cancelled."""
        while self._queues and Capability.SETTINGS in transport.capabilities:
            await asyncio.sleep(_READ_EVERY)
            await self.read(transport)


def with_settings(s: Subscription, settings: QueueSettings) -> Subscription:
    """The subscription, with the settings in place of options that the subscriber did not give."""
    values = {name: getattr(settings, name) for name in _OPTIONS}
    changes = {name: value for name, value in values.items() if value is not None and name not in s.own}
    for name in ("max_crashes", "max_deliveries"):
        if changes.get(name) == 0:
            changes[name] = None  # no limit
    if "lease" in changes and s.heartbeat is not None and seconds(s.heartbeat) >= changes["lease"]:
        changes["heartbeat"] = None
    return msgspec.structs.replace(s, **changes) if changes else s
