"""The store: six verbs on a database, and the rooms beside them."""

from __future__ import annotations

import asyncio
import logging
import math
import secrets
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from functools import cached_property, partial
from typing import Any
from uuid import UUID

import msgspec

from millpond import outcome as outcomes_
from millpond.checks import integer
from millpond.clock import SECOND, Seconds, micros, monotonic
from millpond.errors import DataRefused, MillpondError, StoreBusy
from millpond.halves import NOT_THE_ROWS
from millpond.message import Claim, Draft, Message, Published, Receipt, check_id, draft
from millpond.outcome import Outcome
from millpond.seam.transport import DEFAULT_LEASE, Capability
from millpond.telemetry import Event
from millpond.transports.database.access.access import DatabaseAccess
from millpond.transports.database.borrowed.identity import OwnDatabase
from millpond.transports.database.bulk import DatabaseBulk
from millpond.transports.database.diagnosis.diagnosis import DatabaseDiagnosis
from millpond.transports.database.exports.exports import DatabaseExports
from millpond.transports.database.messages.claim import adopt, claim_queue, next_due
from millpond.transports.database.messages.failing_claims import FailingClaims
from millpond.transports.database.messages.groups import PublishGroups, Tries
from millpond.transports.database.messages.hints import Hints
from millpond.transports.database.messages.publish import ALL_NEW, Inserted, are_new, insert_drafts, publish_results
from millpond.transports.database.messages.settle import SettleResult, extend_leases, write_outcomes
from millpond.transports.database.messages.settle_in_halves import settle_in_halves
from millpond.transports.database.messages.suspects import claim_suspect
from millpond.transports.database.messages.work_check import WorkFound, check_work
from millpond.transports.database.migration.migrate import Migration
from millpond.transports.database.moves.move_steps import DatabaseMoving
from millpond.transports.database.operations.operations import DatabaseOperations
from millpond.transports.database.options import StoreOptions
from millpond.transports.database.periodic import DatabasePeriodic
from millpond.transports.database.runner import Engine, Mode, Runner
from millpond.transports.database.shards import DatabaseShards, PlacementCheck
from millpond.transports.database.sql.statement import Steps
from millpond.transports.database.sql.writes import Stamp
from millpond.transports.database.streams.streams import DatabaseStreams
from millpond.transports.database.transactions import CHECK_MAP_EVERY, DatabaseTransactions
from millpond.transports.database.workers.workers import DatabaseWorkers
from millpond.transports.shard_map import ShardRecord
from millpond.transports.shares import Shares
from millpond.transports.url import Url
from millpond.transports.validation import check_outcomes, check_receipts, lease_to_claim, queue_names

log = logging.getLogger("millpond")

CAPABILITIES = (
    Capability.TRANSACTIONS
    | Capability.CLAIM_BY_ID
    | Capability.PRIORITY
    | Capability.ORDER
    | Capability.DEDUPE
    | Capability.UNIQUE
    | Capability.EXTEND
    | Capability.BROWSE
    | Capability.PERIODIC
    | Capability.RESCHEDULE
    | Capability.ARCHIVE
    | Capability.DEAD_LETTERS
    | Capability.PAUSE
    | Capability.SETTINGS
    | Capability.PRESENCE
    | Capability.STREAMS
    | Capability.STREAM_STATUS
    | Capability.BULK
    | Capability.EXPORTS
    | Capability.FREE_RECEIPTS
    | Capability.ACCESS
    | Capability.SHARED
    | Capability.ONE_ORDER
    | Capability.UNIQUE_IDS
    | Capability.ATOMIC
    | Capability.DURABLE
)
_SETTLE_AGAIN = 0.02
CHECK_EVERY = 0.8
"""Longest time in seconds that a wait leaves unread what other processes did."""


class ClaimOptions(msgspec.Struct, frozen=True):
    """The arguments of one call of `claim`."""

    names: list[str]
    limit: int
    ids: Sequence[UUID] | None
    suspects: bool
    others: bool
    lease: int
    """In microseconds."""
    ahead: int
    holder: int | None
    """The worker whose row holds the claims. None: each message has a separate lease."""
    tokens: list[int] = msgspec.field(default_factory=list)
    """Those that this call has given to the worker."""


class DatabaseStore:
    """A store on one database. Rooms are made on first use, over one runner."""

    capabilities = CAPABILITIES
    missing_shards = ()

    def __init__(self, engine: Engine, options: StoreOptions, url: Url) -> None:
        self.runner = Runner(engine, options, url)
        self.hints = Hints(engine.dialect)
        self.url = url
        self.dialect = engine.dialect
        self.migrated: list[Migration] = []
        """Migrations that were applied on connecting."""
        self.own_database = OwnDatabase()
        """Recognises connections of callers; set after connecting."""
        self.placement: PlacementCheck | None = None
        """Set if this handle is one of several of a pond that routes messages."""
        self._check_at = monotonic() + CHECK_MAP_EVERY
        self._turn = 0
        self._groups = PublishGroups(self._publish_drafts)
        self._failing_claims = FailingClaims(self.runner)
        self._closing = False
        self._listening: asyncio.Task[None] | None = None

    def __repr__(self) -> str:
        return f"<DatabaseStore {self.url}>"

    @property
    def shard(self) -> ShardRecord | None:
        """Set if the database is one of several shards, and this handle stands alone."""
        return self.runner.shard

    @shard.setter
    def shard(self, record: ShardRecord | None) -> None:
        self.runner.shard = record

    @property
    def on_event(self) -> Callable[[Event], None] | None:
        return self.runner.on_event

    @on_event.setter
    def on_event(self, call: Callable[[Event], None] | None) -> None:
        self.runner.on_event = call

    # --- rooms --------------------------------------------------------------------------------------

    @cached_property
    def operations(self) -> DatabaseOperations:
        return DatabaseOperations(self.runner, self.hints, self.bulk)

    @cached_property
    def periodic(self) -> DatabasePeriodic:
        return DatabasePeriodic(self.runner, self.hints)

    @cached_property
    def streams(self) -> DatabaseStreams:
        return DatabaseStreams(self.runner, self.hints)

    @cached_property
    def bulk(self) -> DatabaseBulk:
        return DatabaseBulk(self.runner)

    @cached_property
    def exports(self) -> DatabaseExports:
        return DatabaseExports(self.runner)

    @cached_property
    def diagnosis(self) -> DatabaseDiagnosis:
        return DatabaseDiagnosis(self.runner)

    @cached_property
    def access(self) -> DatabaseAccess:
        return DatabaseAccess(self.runner)

    @cached_property
    def transactions(self) -> DatabaseTransactions:
        return DatabaseTransactions(
            self.dialect, self.runner.options, self.hints, self.runner.check_open, own=self.own_database
        )

    @cached_property
    def shards(self) -> DatabaseShards:
        return DatabaseShards(self.runner)

    @cached_property
    def moving(self) -> DatabaseMoving:
        return DatabaseMoving(self.runner)

    @cached_property
    def workers(self) -> DatabaseWorkers:
        return DatabaseWorkers(self.runner, self.hints)

    # --- publish ------------------------------------------------------------------------------------

    async def publish(self, messages: Sequence[Message], *, within: Any = None) -> list[Published]:
        if monotonic() >= self._check_at:
            await self._read_map()
        if self._closing or self.runner.shard is not None:
            self.runner.check_whole(closing=self._closing)
        if within is not None:
            return await self.transactions.publish(messages, within=within)
        limit = self.runner.options.body_limit
        return await self.publish_drafts([draft(message, body_limit=limit) for message in messages])

    async def _read_map(self) -> None:
        """The database may have become a shard since this handle was connected."""
        self.runner.check_open(closing=self._closing)
        self._check_at = monotonic() + CHECK_MAP_EVERY
        if self.shard is None and self.placement is None:
            record = await self.shards.record()
            self.shard = record if record is not None and len(record.map.shards) > 1 else None

    async def publish_drafts(self, drafts: Sequence[Draft]) -> list[Published]:
        """`publish` for checked messages."""
        if self._closing:
            self.runner.check_open(closing=True)
        if not drafts:
            return []
        # A unique message may wait for a lock of another transaction, and no other publish shall wait with it.
        if len(drafts) == 1 and not drafts[0].given and drafts[0].unique is None:
            return [await self._groups.publish(drafts[0])]
        return await self._publish_drafts(drafts, Tries(), new=are_new(drafts))

    async def _publish_drafts(self, drafts: Sequence[Draft], tries: Tries, *, new: bool = True) -> list[Published]:
        """`new`: see `are_new`. It is true for groups."""
        one = self.placement is None and self.dialect.writes.is_one_statement(drafts, new=new, own_connection=True)
        inserted = await self.runner.run(
            partial(self._publish_steps, drafts, new, tries.marks),
            Mode.ONE if one else Mode.WRITE,
            again=tries.lost,
            mode_again=Mode.WRITE,  # a second try has to find out about the first one
            on_lost=tries.on_lost,
        )
        self.hints.published(drafts)
        return publish_results(drafts, inserted)

    def _publish_steps(self, drafts: Sequence[Draft], new: bool, marks: list[int], again: bool) -> Steps[Inserted]:
        look_up = again or not new
        if not again:
            marks.clear()  # nothing of earlier tries was committed
        # A first try without an id of the caller leaves no mark.
        marks.append(secrets.randbits(62) if look_up else 0)
        if self.placement is not None:
            yield from self.placement.steps(drafts, marks[:-1] if again else None)
        now, notify = self.runner.now(), self.runner.options.notify
        if not look_up:
            yield from self.dialect.writes.insert(drafts, now, own_connection=True, notify=notify)
            return ALL_NEW
        return (
            yield from insert_drafts(
                self.dialect,
                drafts,
                now=now,
                dedupe_for=self.runner.dedupe_for,
                own_connection=True,
                notify=notify,
                marks=marks,
            )
        )

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
        self.runner.check_open()
        names = queue_names(queues)
        integer(limit, "limit")
        lease_us = lease_to_claim(lease)
        holder = self.workers.hold(lease_us) if by_worker else None
        if limit == 0 or not names or (ids is not None and not ids) or not (suspects or others):
            return []
        if others:
            self.hints.fresh.difference_update(names)
        request = ClaimOptions(names, limit, ids, suspects, others, lease_us, int(ahead), holder)
        taken: set[int] = set()
        try:
            runnable = await self._claim_runnable(request, max_deliveries)
        finally:
            if request.tokens and (taken := self.workers.unreturned.end(request.tokens)):
                self.workers.abandoned.lose(taken)
        return [claim for claim in runnable if claim.receipt.token not in taken] if taken else runnable

    async def _claim_runnable(self, request: ClaimOptions, max_deliveries: int | None) -> list[Claim]:
        """Claim until there is a message that may run, or none at all."""
        while True:
            claims: list[Claim] = []
            try:
                await self._claim_due(claims, request)
                runnable, refused = outcomes_.split_runnable(claims, max_deliveries=max_deliveries)
                if refused:
                    await self._settle_refused(refused, request, alone=not runnable)
            except asyncio.CancelledError:
                # The messages are not returned, so they go back. Separate leases just end.
                if request.holder is not None:
                    self.workers.abandoned.lose({claim.receipt.token for claim in claims})
                raise
            if runnable or not refused:
                return runnable

    async def _claim_due(self, claims: list[Claim], request: ClaimOptions) -> None:
        """Add claims, and give back lapsed ones first if there are too few. An error is raised if there is none."""
        try:
            await self._claim(claims, request)
            if len(claims) >= request.limit or _is_suspect(claims):
                return
            if await self.workers.reap_if_due(may_wait=not claims):
                await self._claim(claims, request)
        except Exception as e:
            if not claims:
                raise
            _log_cut_short("claim cut short: %d messages, then %s", len(claims), e)

    async def _settle_refused(self, refused: Sequence[Outcome], request: ClaimOptions, *, alone: bool) -> None:
        """Settle messages that must not run. An error is raised if they are alone."""
        try:
            settled = await self.runner.run(partial(self._settle_steps, refused), Mode.LOOSE)
            if request.holder is not None:  # locked by another transaction
                self.workers.abandoned.leave(outcome.receipt for outcome in settled.locked)
        except Exception as e:
            if request.holder is not None:
                self.workers.abandoned.leave(outcome.receipt for outcome in refused)
            if alone:
                raise
            _log_cut_short("messages that must not run cannot be settled yet: %d (%s)", len(refused), e)

    async def _claim(self, claims: list[Claim], request: ClaimOptions) -> None:
        """Add claims up to the limit. After an error, `claims` has those of the queues before."""
        names, limit = request.names, request.limit
        if request.ids is not None:
            keys = [self.dialect.id_in(check_id(id_)) for id_ in request.ids]
            wanted = limit - len(claims)
            claims += await self._run_claim(
                request, lambda stamp: self.dialect.writes.claim_ids(names, keys, wanted, stamp)
            )
            return
        self._turn += 1
        shares = Shares(names, limit - len(claims), self._turn)
        for queue, share in shares:
            before = len(claims)
            await self._claim_queue(claims, queue, share, request)
            shares.taken += len(claims) - before
            if _is_suspect(claims[before:]):
                break  # alone: nothing was claimed before it, nothing is after it

    async def _claim_queue(self, claims: list[Claim], queue: str, limit: int, request: ClaimOptions) -> None:
        lanes, suspects = self.hints.lanes_of(queue), request.suspects and not claims
        lanes.claimed_at = monotonic()

        def steps(stamp: Stamp) -> Steps[list[Claim]]:
            if request.others:
                return claim_queue(self.dialect, lanes, queue, limit, stamp, suspects=suspects)
            return claim_suspect(self.dialect, queue, stamp)

        async def whole() -> None:
            claims.extend(await self._run_claim(request, steps))

        async def by_ids(ids: Sequence[Any], wanted: int) -> int:
            writes = self.dialect.writes
            claims.extend(
                got := await self._run_claim(
                    request, lambda stamp: writes.claim_ids([queue], ids, wanted, stamp), one=True
                )
            )
            return len(got)

        if await self._failing_claims.claim(queue, limit, whole, by_ids, others=request.others, suspects=suspects):
            lanes.fall()  # the hints know nothing of these claims

    async def _run_claim(
        self, request: ClaimOptions, steps: Callable[[Stamp], Steps[list[Claim]]], *, one: bool = False
    ) -> list[Claim]:
        """Claim with a token that no other claim has: a retry then adopts no row that was handed out before.

        `one`: in one transaction, which wrote nothing if the database answered with an error.
        """
        by_worker = request.holder is not None
        worker = request.holder if by_worker else self.workers.mark
        stamp = Stamp(secrets.randbits(62), worker, request.lease, self.runner.now(), request.ahead, by_worker)

        if by_worker:
            request.tokens.append(stamp.token)
            self.workers.unreturned.begin(stamp.token, request.lease)

        lost = False

        def on_lost() -> None:
            nonlocal lost
            lost = True

        def adopt_or_claim(again: bool) -> Steps[list[Claim]]:
            # The lost reply may have been that of a claim: rows with its token are ours.
            if again and (adopted := (yield from adopt(self.dialect, stamp))):
                return adopted
            return (yield from steps(stamp))

        try:
            claims = await self.runner.run(adopt_or_claim, Mode.LOOSE, on_lost=on_lost)
        except BaseException as e:
            answered = isinstance(e, Exception) and not isinstance(e, NOT_THE_ROWS)
            if by_worker and not (one and answered and not lost):  # it may have been committed, or be committed yet
                self.workers.abandoned.lose([stamp.token])
            raise
        if by_worker and lost:  # the server may commit an earlier try yet, with other messages
            self.workers.abandoned.lose([stamp.token], {claim.receipt.id for claim in claims})
        return claims

    # --- extend, settle -----------------------------------------------------------------------------

    async def extend(self, receipts: Sequence[Receipt], lease: Seconds = DEFAULT_LEASE) -> list[Receipt]:
        self.runner.check_open()
        lease_us = micros(lease, "lease")
        check_receipts(receipts)
        unique = list(dict.fromkeys(receipts))
        if not unique:
            return []
        return await self.runner.loose(partial(extend_leases, self.dialect, unique, lease_us, now=self.runner.now()))

    async def settle(
        self, outcomes: Sequence[Outcome], *, within: Any = None, wait: bool = True, again: bool = False
    ) -> list[Receipt]:
        if within is not None:
            return await self.transactions.settle(outcomes, within=within)
        self.runner.check_open()
        check_outcomes(outcomes)
        refused: list[Receipt] = []
        deadline = monotonic() + self.runner.busy_for

        def on_lost() -> None:
            nonlocal again
            again = True  # also of rows that are locked now, perhaps by the try whose reply was lost

        while outcomes:
            steps = partial(self._settle_steps, outcomes)
            try:
                settled = await self.runner.run(steps, Mode.LOOSE, wait=wait, again=again, on_lost=on_lost)
            except DataRefused as e:
                if not wait:  # the caller writes them apart by itself
                    raise
                # Again: some of them may have been written before the error.
                return refused + await settle_in_halves(partial(self.settle, again=True), outcomes, e)
            refused += settled.refused
            self.hints.settled(outcomes, clock_stands=self.runner.now() is not None)
            outcomes = settled.locked
            if outcomes:
                if not wait or monotonic() > deadline:
                    busy = StoreBusy(
                        f"{len(outcomes)} messages are locked by another transaction; all other outcomes were "
                        "written. Settle these again",
                        [outcome.receipt for outcome in outcomes],
                        refused,
                    )
                    busy.again = again
                    raise busy
                await asyncio.sleep(_SETTLE_AGAIN)
        return refused

    def _settle_steps(self, outcomes: Sequence[Outcome], again: bool) -> Steps[SettleResult]:
        return write_outcomes(
            self.dialect, outcomes, now=self.runner.now(), again=again, notify=self.runner.options.notify
        )

    # --- wait, close --------------------------------------------------------------------------------

    async def wait(self, queues: Sequence[str], timeout: Seconds) -> None:
        self.runner.check_open()
        names = queue_names(queues)
        ends_at = monotonic() + micros(timeout, "timeout") / SECOND
        with self.hints.waiting(names) as event:
            self._listen()
            while not self.hints.fresh.intersection(names):
                pause = min(await self._until_due(names), ends_at - monotonic())
                try:
                    await asyncio.wait_for(event.wait(), max(0.0, min(pause, CHECK_EVERY)))
                    return
                except TimeoutError:
                    # Without notifications this is the wake-up: the caller claims. With them the next due time is
                    # read again, because a nack of another process that is due much later is not announced.
                    if pause <= CHECK_EVERY or not self.dialect.has_notifications:
                        return

    async def _until_due(self, names: Sequence[str]) -> float:
        """Seconds until the next known message of these queues falls due.

        A message that fell due since the caller's claim is due now. The claim did not get one that is overdue for
        longer: it is locked or paused, or new.
        """
        seconds = math.inf
        for queue in names:
            lanes = self.hints.lanes.get(queue)
            if lanes is not None and lanes.known:
                due = await self.runner.read(partial(next_due, self.dialect, lanes, queue, self.runner.now()))
                if due is not None:
                    is_older = -due / SECOND >= monotonic() - lanes.claimed_at
                    seconds = min(seconds, CHECK_EVERY if is_older else max(0.0, due / SECOND))
        return seconds

    async def check_work(self, queues: Sequence[str]) -> WorkFound:
        """Whether a claim of these queues is worth its cost; see `work_check.py`."""
        return await self.runner.read(partial(check_work, self.dialect, self.hints, queues, self.runner.now()))

    def _listen(self) -> None:
        if self._listening is None and self.runner.options.notify:
            self._listening = asyncio.create_task(self.runner.engine.listen(self.dialect.channel, self.hints.notified))

    async def close(self) -> None:
        if self._closing:
            return
        self._closing = True
        # Each step also if the caller is cancelled in another: a second close would do nothing.
        async with AsyncExitStack() as stack:
            stack.push_async_callback(self.runner.engine.close)
            stack.push_async_callback(self.workers.leave)
            stack.push_async_callback(self._end_calls)
            await self._groups.flush()

    async def _end_calls(self) -> None:
        self.runner.closed = True
        self.hints.wake()
        if self._listening is not None:
            self._listening.cancel()
            await asyncio.wait([self._listening])


def _is_suspect(claims: Sequence[Claim]) -> bool:
    """Whether these are one suspect, which is claimed alone."""
    return len(claims) == 1 and claims[0].suspect


def _log_cut_short(text: str, count: int, error: Exception) -> None:
    """The claims that may run are returned all the same: otherwise they would wait for the end of their lease."""
    log.warning(text, count, error, exc_info=not isinstance(error, MillpondError))
