"""The six verbs over several stores."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack, suppress
from functools import cached_property
from typing import Any
from uuid import UUID

import msgspec

from millpond.checks import integer
from millpond.clock import Seconds, micros, monotonic, seconds
from millpond.errors import (
    Closed,
    DataRefused,
    PartlyPublished,
    ShardMapChanged,
    ShardUnavailable,
    StoreBusy,
    StoreUnavailable,
)
from millpond.loop import Backoff
from millpond.message import Claim, Draft, Message, Published, Receipt, draft, new_id
from millpond.outcome import GiveBack, Nack, Outcome
from millpond.seam.transport import DEFAULT_LEASE, Capability, missing
from millpond.telemetry import Event
from millpond.transports.database.store import CAPABILITIES, DatabaseStore
from millpond.transports.sharded.access import ShardedAccess
from millpond.transports.sharded.claims import ClaimKind, ShardedClaims, claim_order, on_shard
from millpond.transports.sharded.diagnosis import ShardedDiagnosis
from millpond.transports.sharded.members import Members, first_error
from millpond.transports.sharded.operations import ShardedOperations
from millpond.transports.sharded.periodic import ShardedPeriodic
from millpond.transports.sharded.shard import Shard
from millpond.transports.sharded.streams import ShardedStreams
from millpond.transports.sharded.transactions import ShardedTransactions
from millpond.transports.sharded.unique import placed_by_value
from millpond.transports.sharded.workers import ShardedWorkers
from millpond.transports.validation import check_outcomes, check_receipts, lease_to_claim, queue_names

_LACKING = (
    Capability.ONE_ORDER
    | Capability.ORDER
    | Capability.PRIORITY
    | Capability.UNIQUE_IDS
    | Capability.ATOMIC
    | Capability.STREAMS
    | Capability.BULK
    | Capability.EXPORTS
)
"""These hold on each shard only."""
_END_WITHIN = 0.25
"""Seconds for which a wait that is over waits for a shard that does not answer."""


class ShardedStore:
    """Several databases as one transport."""

    capabilities = CAPABILITIES & ~_LACKING
    bulk = missing("a bulk publish over shards", Capability.BULK)
    exports = missing("an export over shards", Capability.EXPORTS)

    def __init__(
        self,
        members: Members,
        transactions: ShardedTransactions,
        *,
        body_limit: int,
        reroute: bool = False,
    ) -> None:
        self.members = members
        self.transactions = transactions
        transactions.check_open = self._check_open
        self._body_limit = body_limit
        self._reroute = reroute
        self._claims = ShardedClaims(members.claimed)
        self._closed = False
        self._ending: list[asyncio.Task[None]] = []

    def __repr__(self) -> str:
        return f"<ShardedStore {', '.join(map(repr, self.members.shards))}>"

    @property
    def on_event(self) -> Callable[[Event], None] | None:
        return self.members.shards[0].on_event

    @on_event.setter
    def on_event(self, call: Callable[[Event], None] | None) -> None:
        for shard in self.members.shards:
            shard.on_event = call
            if shard.store is not None:
                shard.store.on_event = call

    @cached_property
    def operations(self) -> ShardedOperations:
        return ShardedOperations(self.members)

    @cached_property
    def diagnosis(self) -> ShardedDiagnosis:
        return ShardedDiagnosis(self.members)

    @cached_property
    def periodic(self) -> ShardedPeriodic:
        return ShardedPeriodic(self.members)

    @cached_property
    def streams(self) -> ShardedStreams:
        return ShardedStreams(self.members)

    @cached_property
    def access(self) -> ShardedAccess:
        return ShardedAccess(self.members)

    @cached_property
    def workers(self) -> ShardedWorkers:
        return ShardedWorkers(self.members, self._claims)

    @property
    def missing_shards(self) -> tuple[str, ...]:
        return self.members.missing

    def _check_open(self) -> None:
        if self._closed:
            raise Closed("this pond of several shards was closed; connect again")

    # --- publish ------------------------------------------------------------------------------------

    async def publish(self, messages: Sequence[Message], *, within: Any = None) -> list[Published]:
        self._check_open()
        if within is not None:
            return await self.transactions.publish(messages, within=within)
        drafts = [draft(placed_by_value(message), body_limit=self._body_limit) for message in messages]
        published: dict[int, Published] = {}
        failed: dict[str, BaseException] = {}
        left = list(range(len(drafts)))
        give_up_at, backoff = monotonic() + self.members.change_within, Backoff(0.01, 0.2)
        while left:
            left, errors = await self._publish_parts(drafts, left, published, failed)
            stored = {id_ for error in errors.values() for id_ in error.stored}
            published |= {n: Published(drafts[n].id) for n in left if drafts[n].id in stored}
            left = [n for n in left if n not in published]
            # Without a newer map: the new owner does not accept messages yet.
            newer = any([self.members.adopt(error.map) for error in errors.values() if error.map is not None])
            if left and not newer:
                if monotonic() > give_up_at:
                    failed |= errors
                    break
                await asyncio.sleep(backoff.next())
        if failed:
            self._raise_partly(failed, [published[n] for n in sorted(published)])
        return [published[n] for n in range(len(drafts))]

    async def _publish_parts(
        self,
        drafts: list[Draft],
        wanted: Sequence[int],
        published: dict[int, Published],
        failed: dict[str, BaseException],
    ) -> tuple[list[int], dict[str, ShardMapChanged]]:
        """Publish on each shard its part. Returns the messages that were routed by an old map, and those errors."""
        parts: dict[str, list[int]] = {}
        for n in wanted:
            one = drafts[n]
            name = self.members.map.place_draft(one)
            if self._reroute and name in self.members and not self.members[name].available:
                drafts[n] = one = self._elsewhere(one)
                name = self.members.map.place_draft(one)
            parts.setdefault(name, []).append(n)
        results: list[Any]
        if len(parts) == 1:
            ((name, part),) = parts.items()
            try:
                results = [await self._publish_on(name, [drafts[n] for n in part])]
            except Exception as e:
                results = [e]
        else:
            results = await asyncio.gather(
                *(self._publish_on(name, [drafts[n] for n in part]) for name, part in parts.items()),
                return_exceptions=True,
            )
        changed: dict[str, ShardMapChanged] = {}
        rerouted: list[int] = []
        for (name, part), result in zip(parts.items(), results, strict=True):
            if isinstance(result, ShardMapChanged):
                changed[name] = result
            elif isinstance(result, BaseException):
                unsent = self._reroute and isinstance(result, ShardUnavailable) and result.unsent
                others = {n: other for n in part if unsent and (other := self._elsewhere(drafts[n])) is not drafts[n]}
                for n, other in others.items():
                    drafts[n] = other
                rerouted += others
                if len(others) < len(part):
                    failed[name] = result
            else:
                published |= dict(zip(part, result, strict=True))
        left = [n for name in changed for n in parts[name]]
        if rerouted:
            more, errors = await self._publish_parts(drafts, rerouted, published, failed)
            return left + more, changed | errors
        return left, changed

    async def _publish_on(self, name: str, drafts: Sequence[Draft]) -> list[Published]:
        return await self.members[name].call(lambda store: store.publish_drafts(drafts))

    def _elsewhere(self, draft: Draft) -> Draft:
        """The message under a new id that belongs to a shard that answers, if neither key nor caller chose one.

        No statement was sent to its own shard.
        """
        living = {shard.name for shard in self.members.shards if not shard.breaker.is_open}
        if draft.given or draft.key is not None or not any(owner in living for _, owner in self.members.map.ranges):
            return draft
        while True:
            id_ = new_id()
            if self.members.map.place(None, id_.bytes) in living:
                return msgspec.structs.replace(draft, id=id_, point=None)

    def _raise_partly(self, errors: dict[str, BaseException], published: list[Published]) -> None:
        error = first_error(errors.values())
        if not published:
            raise error
        raise PartlyPublished(
            f"the shards {', '.join(errors)} refused their messages, and {len(published)} messages were stored on "
            f"others; publish those that are not in `published` again. The first error: {error}",
            [one.id for one in published],
        ) from error

    # --- claim --------------------------------------------------------------------------------------

    async def claim(
        self,
        queues: Sequence[str],
        limit: int = 1,
        lease: Seconds = DEFAULT_LEASE,
        *,
        ids: Sequence[UUID] | None = None,
        max_deliveries: int | None = None,
        suspects: bool = True,
        others: bool = True,
        ahead: bool = False,
        by_worker: bool = False,
    ) -> list[Claim]:
        self._check_open()
        names = queue_names(queues)
        integer(limit, "limit")
        lease_to_claim(lease)
        if limit == 0 or not names or (ids is not None and not ids) or not (suspects or others):
            return []

        async def on(shard: Shard, store: DatabaseStore, share: int) -> list[Claim]:
            if by_worker:
                await self.workers.hold(shard)
            found = await store.claim(
                names,
                share,
                lease,
                ids=ids,
                max_deliveries=max_deliveries,
                suspects=suspects,
                others=others,
                ahead=ahead,
                by_worker=by_worker,
            )
            if found and self.workers.attention is not None:
                self.workers.attention.claimed(shard)
            return found

        if self.workers.attention is not None and by_worker:
            self.workers.attention.queues.update(names)
        if ids is not None:
            return await self._claim_ids(on, limit)
        kind = ClaimKind(tuple(names), others, by_worker)
        held_for = seconds(lease)

        def may_claim(shard: Shard) -> bool:
            return not by_worker or self.workers.may_claim(shard, held_for)

        return await self._claims.claim(kind, limit, on, lease=held_for, suspects=suspects, may_claim=may_claim)

    async def _claim_ids(self, on: Any, limit: int) -> list[Claim]:
        """One shard after the other: an id is on one of them, and the limit counts for all."""

        async def claim_on(shard: Shard, most: int) -> list[Claim]:
            found: list[Claim] = await shard.call(lambda store: on(shard, store, most))
            return found

        claims: list[Claim] = []
        try:
            for shard in self.members.chosen:
                if len(claims) < limit:
                    with suppress(ShardUnavailable):
                        found = await claim_on(shard, limit - len(claims))
                        claims += (on_shard(claim, shard.name) for claim in found)
        except BaseException:  # another shard refuses, or the caller is cancelled
            self._claims.give_back(claims)
            raise
        return sorted(claims, key=claim_order)

    # --- extend, settle -----------------------------------------------------------------------------

    async def extend(self, receipts: Sequence[Receipt], lease: Seconds = DEFAULT_LEASE) -> list[Receipt]:
        self._check_open()
        micros(lease, "lease")
        check_receipts(receipts)
        unique = list(dict.fromkeys(receipts))
        refused, errors, _ = await self.members.by_receipt(
            unique, lambda receipt: receipt, lambda store, part: store.extend(part, lease)
        )
        if errors:
            raise first_error(errors.values())
        return refused

    async def settle(
        self, outcomes: Sequence[Outcome], *, within: Any = None, wait: bool = True, again: bool = False
    ) -> list[Receipt]:
        self._check_open()
        check_outcomes(outcomes)
        for outcome in outcomes:  # before one shard has written its part
            if isinstance(outcome, Nack | GiveBack) and outcome.delay is not None:
                micros(outcome.delay, "delay")
        if within is not None:
            return await self.transactions.settle(outcomes, within=within)
        refused, errors, unknown = await self.members.by_receipt(
            outcomes,
            lambda outcome: outcome.receipt,
            lambda store, part: store.settle(part, wait=wait, again=again),
        )
        if errors:
            self._raise_unsettled(outcomes, refused, errors, unknown)
        return refused

    def _raise_unsettled(
        self, outcomes: Sequence[Outcome], refused: list[Receipt], errors: Any, unknown: Sequence[Receipt]
    ) -> None:
        """Name the receipts of shards that do not answer, and those that a shard refused: all others were written."""
        refusing = [e for e in errors.values() if isinstance(e, DataRefused) and e.receipts]
        if not all(isinstance(e, StoreUnavailable | StoreBusy) or e in refusing for e in errors.values()):
            raise first_error(errors.values())
        left = list(unknown)
        for name, error in errors.items():
            mine = [outcome.receipt for outcome in outcomes if outcome.receipt.shard == name]
            if isinstance(error, StoreBusy | DataRefused) and error.receipts:
                locked = {(receipt.id, receipt.token) for receipt in error.receipts}
                mine = [receipt for receipt in mine if (receipt.id, receipt.token) in locked]
                refused += error.refused
            left += mine
        if len(refusing) == len(errors):
            raise DataRefused(str(refusing[0]), left, refused) from refusing[0]
        if len(left) == len(outcomes):
            raise first_error(errors.values())
        busy = StoreBusy(
            f"{len(left)} outcomes could not be written on the shards {', '.join(errors)}; all others were. Settle "
            "these again",
            left,
            refused,
        )
        busy.again = any(not isinstance(e, StoreBusy | DataRefused) or e.again for e in errors.values())
        raise busy from first_error(errors.values())

    # --- wait, close --------------------------------------------------------------------------------

    async def wait(self, queues: Sequence[str], timeout: Seconds) -> None:
        self._check_open()
        names = queue_names(queues)
        limit = seconds(timeout, "timeout")
        waiting: set[asyncio.Future[None]] = {asyncio.ensure_future(self._claims.late_messages(names))}
        if self.workers.attention is not None:
            waiting.add(asyncio.ensure_future(self.workers.attention.found()))
        claiming = self._claims.under_way(names)
        for shard in self.members.claimed:
            # While a claim is under way, its answer is waited for. A claim also finds out whether a shard is back.
            if not shard.breaker.is_open and shard.name not in claiming:
                waiting.add(asyncio.ensure_future(shard.call(lambda store: store.wait(names, timeout))))
        try:
            async with asyncio.timeout(limit):
                while True:
                    done, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
                    if any(one.exception() is None for one in done):
                        return
                    self._check_open()
        except TimeoutError:
            return
        finally:
            for one in waiting:
                one.cancel()
            if waiting:
                await asyncio.wait(waiting, timeout=_END_WITHIN)

    async def close(self) -> None:
        if not self._closed:
            self._closed = True
            # Each step also if the caller is cancelled in another: a second close would do nothing.
            async with AsyncExitStack() as stack:
                stack.push_async_callback(self._close_shards)
                stack.push_async_callback(self.workers.close)
                await self._claims.close()

    async def _close_shards(self) -> None:
        # Not `gather`, which would cancel them with the caller, before they have begun.
        self._ending = [asyncio.create_task(shard.close()) for shard in self.members.shards]
        await asyncio.wait(self._ending)
        for one in self._ending:
            one.result()
