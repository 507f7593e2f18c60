"""A transport in this process: the six verbs on a pond."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Sequence
from typing import Any
from uuid import UUID
from weakref import WeakValueDictionary

from millpond.clock import SECOND, Seconds, micros
from millpond.errors import InvalidOption
from millpond.message import (
    Claim,
    Message,
    Published,
    Receipt,
    draft,
)
from millpond.outcome import MAX_CRASHES, SUSPECT, Change, Outcome, change, refuse_to_run
from millpond.transport import DEFAULT_LEASE, Capability
from millpond.transports.arguments import (
    check_outcomes,
    check_receipts,
    known_options,
    lease_to_claim,
    queue_names,
    unique_ids,
    whole_number,
)
from millpond.transports.memory.operations import Operations, no_transactions
from millpond.transports.memory.pond import MemoryOptions, Pond
from millpond.transports.url import Url

CAPABILITIES = (
    Capability.CLAIM_BY_ID
    | Capability.PRIORITY
    | Capability.ORDER
    | Capability.DEDUPE
    | Capability.EXTEND
    | Capability.BROWSE
    | Capability.RESCHEDULE
    | Capability.ARCHIVE
    | Capability.DEAD_LETTERS
    | Capability.FREE_RECEIPTS
    | Capability.PAUSE
)


class MemoryTransport(Operations):
    """One caller's handle on a pond."""

    capabilities = CAPABILITIES

    def __init__(self, pond: Pond, url: Url) -> None:
        super().__init__(pond, url)
        self._turn = 0
        self._suspects_turn: dict[str, bool] = {}
        self._seen: dict[str, int] = {}

    def __repr__(self) -> str:
        return f"<MemoryTransport {self.url}>"

    async def close(self) -> None:
        if self._open is not None:
            pond, self._open = self._open, None
            for event in pond.waiting:  # a hint too many for others, the end of waiting for us
                event.set()

    async def publish(self, messages: Sequence[Message], *, within: Any = None) -> list[Published]:
        pond = self._pond
        if within is not None:
            no_transactions("publish(within=…)")
        return pond.publish([draft(message, body_limit=pond.options.body_limit) for message in messages])

    async def claim(
        self,
        queues: Sequence[str],
        limit: int = 1,
        lease: Seconds = DEFAULT_LEASE,
        *,
        ids: Sequence[UUID] | None = None,
        max_crashes: int | None = MAX_CRASHES,
        max_deliveries: int | None = None,
        suspects: bool = True,
    ) -> list[Claim]:
        pond = self._pond
        names = queue_names(queues)
        whole_number(limit, "limit")
        lease_us = lease_to_claim(lease)
        wanted = None if ids is None else unique_ids(ids)
        if limit == 0 or not names or wanted == []:
            return []
        self._seen.update({name: pond.changes.get(name, 0) for name in names})
        while True:
            claims = self._take(names, limit, lease_us, wanted, suspects)
            if len(claims) < limit and pond.reap():
                claims += self._take(names, limit - len(claims), lease_us, wanted, suspects and not claims)
            runnable, refused = [], []
            for claim in claims:
                reject = refuse_to_run(claim, max_crashes=max_crashes, max_deliveries=max_deliveries)
                runnable.append(claim) if reject is None else refused.append(reject)
            await self.settle(refused)
            if runnable or not refused:
                return runnable

    def _take(
        self, names: Sequence[str], limit: int, lease: int, ids: Sequence[UUID] | None, suspects: bool
    ) -> list[Claim]:
        pond, now, token = self._pond, self._pond.now(), secrets.randbits(62)
        if ids is not None:
            open_names = {name for name in names if not pond.setting(name).paused}
            due = [r for r in self._waiting(ids) if r.queue in open_names and r.due_us <= now]
            due.sort(key=lambda r: (r.suspect, r.priority, r.due_us, r.id))
            return [pond.deliver(record, token, lease, now) for record in due[:limit]]
        # Each queue in turn goes first and has its share; what one leaves goes to the next.
        self._turn += 1
        turn = self._turn % len(names)
        hungry = [*names[turn:], *names[:turn]]
        claims: list[Claim] = []
        while hungry and len(claims) < limit:
            still_hungry = []
            for n, queue in enumerate(hungry):
                share = -(-(limit - len(claims)) // (len(hungry) - n))
                if pond.setting(queue).paused:
                    continue
                alone = suspects and not claims
                got = self._suspect(queue, token, lease, now) if alone and self._suspects_turn.get(queue, True) else []
                if not got:
                    records = pond.line(queue, suspects=False).take(share, now)
                    got = [pond.deliver(record, token, lease, now) for record in records]
                    if got:
                        self._suspects_turn[queue] = True
                    elif alone:
                        got = self._suspect(queue, token, lease, now)
                if got and got[0].unfinished >= SUSPECT:
                    return got
                claims += got
                if share and len(got) == share:
                    still_hungry.append(queue)
            hungry = still_hungry
        return claims

    def _suspect(self, queue: str, token: int, lease: int, now: int) -> list[Claim]:
        """One suspect, if there is one; then it is the others' turn to go first, so that neither starves."""
        records = list(self._pond.line(queue, suspects=True).take(1, now))
        if records:
            self._suspects_turn[queue] = False
        return [self._pond.deliver(record, token, lease, now) for record in records]

    async def extend(self, receipts: Sequence[Receipt], lease: Seconds = DEFAULT_LEASE) -> list[Receipt]:
        pond = self._pond
        lease_us = micros(lease, "lease")
        check_receipts(receipts)
        refused = []
        for receipt in dict.fromkeys(receipts):
            record = pond.owned(receipt)
            if record is None:
                refused.append(receipt)
            else:
                record.lease_us = pond.now() + lease_us
        return refused

    async def settle(self, outcomes: Sequence[Outcome], *, within: Any = None) -> list[Receipt]:
        pond = self._pond
        if within is not None:
            no_transactions("settle(within=…)")
        check_outcomes(outcomes)
        changes: dict[Receipt, Change] = {}
        for outcome in outcomes:  # all are read before the first is written; of two with one receipt the first counts
            changes.setdefault(outcome.receipt, change(outcome))
        return [receipt for receipt, c in changes.items() if not pond.settle(receipt, c)]

    async def wait(self, queues: Sequence[str], timeout: Seconds) -> None:
        pond, names = self._pond, queue_names(queues)
        seconds = micros(timeout, "timeout") / SECOND
        if any(pond.changes.get(name, 0) != self._seen.get(name, 0) for name in names):
            return
        now = pond.now()
        for name in names:
            for suspects in (False, True):
                due = pond.line(name, suspects=suspects).next_due(now)
                if due is not None:
                    seconds = min(seconds, (due - now) / SECOND)
        event = asyncio.Event()
        pond.waiting.add(event)
        try:
            await asyncio.wait_for(event.wait(), seconds)
        except TimeoutError:
            return
        finally:
            pond.waiting.discard(event)


_named: WeakValueDictionary[str, Pond] = WeakValueDictionary()
"""Ponds by name; one ends when its last handle is closed."""


async def connect(url: Url, **given: Any) -> MemoryTransport:
    """A private pond (`memory://`), or the one that all callers of this process share by name."""
    options = _parse(given)
    name = f"{url.host or ''}{url.path}".strip("/")
    pond = _named.get(name) if name else None
    if pond is None:
        pond = Pond(options)
        pond.now()  # says at once if the clock cannot tell the time
        if name:
            _named[name] = pond
    elif given and options != pond.options:
        raise InvalidOption(f"memory://{name} is open with other options; give the same, or none")
    return MemoryTransport(pond, url)


def _parse(given: dict[str, Any]) -> MemoryOptions:
    known_options(given, MemoryOptions.__struct_fields__)
    options = MemoryOptions(**given)
    limit = options.body_limit
    if isinstance(limit, bool) or not isinstance(limit, int) or limit < 1:
        raise InvalidOption(f"body_limit must be a whole number from 1, not {limit!r}")
    micros(options.dedupe_for, "dedupe_for")
    return options
