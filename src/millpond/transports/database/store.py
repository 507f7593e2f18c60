"""The store: the seam's verbs on a database."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, TypeVar
from uuid import UUID

from millpond import outcome as outcomes_
from millpond.clock import SECOND, Seconds, micros, monotonic
from millpond.errors import StoreBusy, StoreUnavailable
from millpond.message import Claim, Draft, Message, Published, Receipt, check_id, check_text, draft
from millpond.outcome import MAX_CRASHES, Ack, GiveBack, Nack, Outcome, Reject
from millpond.transport import DEFAULT_LEASE, Capability, Presence
from millpond.transports.arguments import check_outcomes, check_receipts, lease_to_claim, queue_names, whole_number
from millpond.transports.database import claim as claiming
from millpond.transports.database import outbox
from millpond.transports.database import publish as publishing
from millpond.transports.database import settle as settling
from millpond.transports.database.claim import Lanes, Stamp
from millpond.transports.database.engine import Engine, Mode
from millpond.transports.database.exporting import ExportVerbs
from millpond.transports.database.migrate import Migration
from millpond.transports.database.once import once
from millpond.transports.database.operations import Operations
from millpond.transports.database.options import StoreOptions
from millpond.transports.database.presence import WorkerPresence, reap_dead
from millpond.transports.database.statement import Steps
from millpond.transports.database.streaming import StreamVerbs
from millpond.transports.url import Url

T = TypeVar("T")

CAPABILITIES = (
    Capability.TRANSACTIONS
    | Capability.CLAIM_BY_ID
    | Capability.PRIORITY
    | Capability.ORDER
    | Capability.DEDUPE
    | Capability.EXTEND
    | Capability.BROWSE
    | Capability.RESCHEDULE
    | Capability.ARCHIVE
    | Capability.DEAD_LETTERS
    | Capability.PAUSE
    | Capability.PRESENCE
    | Capability.STREAMS
    | Capability.FREE_RECEIPTS
    | Capability.SHARED
    | Capability.DURABLE
)
_REAP_EVERY = 1.0
_LOOK_AGAIN = 0.02


class DatabaseStore(Operations, StreamVerbs, ExportVerbs):
    """A store on one database."""

    capabilities = CAPABILITIES

    def __init__(self, engine: Engine, options: StoreOptions, url: Url) -> None:
        super().__init__(engine, options, url)
        self.migrated: list[Migration] = []
        """What was applied to the database on connecting."""
        self._dedupe_for = micros(options.dedupe_for, "dedupe_for")
        self._lanes: dict[str, Lanes] = {}
        self._turn = 0
        self._leases = claiming.Leases()
        self._reaped_at = -_REAP_EVERY
        self._presence: WorkerPresence | None = None
        self._fresh: set[str] = set()
        self._waiting: dict[asyncio.Event, list[str]] = {}
        self._listening: asyncio.Task[None] | None = None

    def __repr__(self) -> str:
        return f"<DatabaseStore {self.url}>"

    # --- publish ------------------------------------------------------------------------------------

    async def publish(self, messages: Sequence[Message], *, within: Any = None) -> list[Published]:
        drafts = self._drafts(messages)
        if within is not None:
            new = await self._within(within, self._publishing(drafts, own_connection=False))
        elif drafts:
            mode = Mode.ONE if publishing.is_one_statement(self.dialect, drafts) else Mode.WRITE
            publisher = secrets.randbits(62)
            new = await self._run(
                lambda again: self._publishing(
                    _looked_up(drafts) if again else drafts, own_connection=True, publisher=publisher, again=again
                ),
                mode,
            )
        else:
            new = set()
        return self._published(drafts, new)

    def publish_sync(self, messages: Sequence[Message], *, within: Any) -> list[Published]:
        drafts = self._drafts(messages)
        return self._published(drafts, self._within_sync(within, self._publishing(drafts, own_connection=False)))

    def _drafts(self, messages: Sequence[Message]) -> list[Draft]:
        self._check_open()
        limit = self._options.body_limit
        return [draft(message, body_limit=limit) for message in messages]

    def _publishing(
        self, drafts: Sequence[Draft], *, own_connection: bool, publisher: int | None = None, again: bool = False
    ) -> Steps[set[UUID]]:
        return publishing.publish(
            self.dialect,
            drafts,
            now=self._now(),
            dedupe_for=self._dedupe_for,
            own_connection=own_connection,
            announce=self._options.notify,
            publisher=publisher,
            again=again,
        )

    def _published(self, drafts: Sequence[Draft], new: set[UUID]) -> list[Published]:
        for queue in {d.queue for d in drafts}:
            self._fresh.add(queue)
        if any(d.given or d.due_us is not None for d in drafts):
            self._drop_floors()
        self._wake()
        results = []
        for d in drafts:
            results.append(Published(d.id, not d.given or d.id in new))
            if d.given:
                new.discard(d.id)  # given twice in one call, it is new once
        return results

    # --- claim --------------------------------------------------------------------------------------

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
        self._check_open()
        names = queue_names(queues)
        whole_number(limit, "limit")
        lease_us = lease_to_claim(lease)
        if limit == 0 or not names or (ids is not None and not ids):
            return []
        self._fresh.difference_update(names)
        while True:
            stamp = Stamp(secrets.randbits(62), self._mark(), lease_us, self._now())
            claims = await self._take(names, limit, stamp, ids, suspects)
            if len(claims) < limit and await self._reap_if_due():
                more = Stamp(secrets.randbits(62), self._mark(), lease_us, self._now())
                claims += await self._take(names, limit - len(claims), more, ids, suspects and not claims)
            runnable, refused = outcomes_.sorted_out(claims, max_crashes=max_crashes, max_deliveries=max_deliveries)
            if refused:
                await self.settle(refused)
            if runnable or not refused:
                return runnable

    async def _take(
        self, names: list[str], limit: int, stamp: Stamp, ids: Sequence[UUID] | None, suspects: bool
    ) -> list[Claim]:
        if ids is not None:
            return await self._claim_ids(names, ids, limit, stamp)
        return await self._claim(names, limit, stamp, suspects)

    async def _claim(self, names: list[str], limit: int, stamp: Stamp, suspects: bool) -> list[Claim]:
        """From several queues: each in turn goes first and has its share; what one leaves goes to the next."""
        self._turn += 1
        turn = self._turn % len(names)
        names = names[turn:] + names[:turn]
        claims: list[Claim] = []
        hungry = names
        while hungry and len(claims) < limit:
            still_hungry = []
            for n, queue in enumerate(hungry):
                share = -(-(limit - len(claims)) // (len(hungry) - n))
                if share == 0:
                    break
                got = await self._claim_queue(queue, share, stamp, suspects and not claims)
                if len(got) == 1 and got[0].unfinished >= outcomes_.SUSPECT:
                    return claims + got  # alone: nothing was claimed before it, nothing is after it
                claims += got
                if len(got) == share:
                    still_hungry.append(queue)
            hungry = still_hungry
        return claims

    async def _claim_queue(self, queue: str, limit: int, stamp: Stamp, suspects: bool) -> list[Claim]:
        lanes = self._lanes.setdefault(queue, Lanes())
        return await self._run_claim(
            lambda: claiming.claim_queue(self.dialect, lanes, queue, limit, stamp, suspects=suspects), stamp
        )

    async def _claim_ids(self, names: list[str], ids: Sequence[UUID], limit: int, stamp: Stamp) -> list[Claim]:
        keys = [self.dialect.id_in(check_id(id_)) for id_ in ids]
        return await self._run_claim(lambda: claiming.claim_ids(self.dialect, names, keys, limit, stamp), stamp)

    async def _run_claim(self, steps: Callable[[], Steps[list[Claim]]], stamp: Stamp) -> list[Claim]:
        def again_or(again: bool) -> Steps[list[Claim]]:
            # The lost reply may have been that of a claim: what carries its token is ours.
            if again and (adopted := (yield from claiming.adopt(self.dialect, stamp))):
                return adopted
            return (yield from steps())

        return await self._run(again_or, Mode.LOOSE)

    # --- extend, settle -----------------------------------------------------------------------------

    async def extend(self, receipts: Sequence[Receipt], lease: Seconds = DEFAULT_LEASE) -> list[Receipt]:
        self._check_open()
        lease_us = micros(lease, "lease")
        check_receipts(receipts)
        unique = list(dict.fromkeys(receipts))
        if not unique:
            return []
        return await self._run(
            lambda again: settling.extend(self.dialect, unique, lease_us, now=self._now()), Mode.LOOSE
        )

    async def settle(self, outcomes: Sequence[Outcome], *, within: Any = None) -> list[Receipt]:
        self._check_open()
        check_outcomes(outcomes)
        if not outcomes:
            return []
        if within is not None:
            settled = await self._within(within, self._settling(outcomes, wait=True))
            self._settled(outcomes)
            return settled.refused
        refused: list[Receipt] = []
        deadline = monotonic() + self._busy_for
        while True:
            settled = await self._run(partial(self._settling, outcomes, False), Mode.LOOSE)
            refused += settled.refused
            self._settled(outcomes)
            if not settled.locked:
                return refused
            if monotonic() > deadline:
                raise StoreBusy(
                    f"{len(settled.locked)} messages are held by another transaction for more than "
                    f"{self._busy_for:g} s; all others were settled. Settle these again"
                )
            outcomes = settled.locked
            await asyncio.sleep(_LOOK_AGAIN)

    def settle_sync(self, outcomes: Sequence[Outcome], *, within: Any) -> list[Receipt]:
        self._check_open()
        check_outcomes(outcomes)
        if not outcomes:
            return []
        refused = self._within_sync(within, self._settling(outcomes, wait=True)).refused
        self._settled(outcomes)
        return refused

    def _settling(self, outcomes: Sequence[Outcome], wait: bool, again: bool = False) -> Steps[settling.Settled]:
        return settling.settle(self.dialect, outcomes, now=self._now(), wait=wait, again=again)

    def _settled(self, outcomes: Sequence[Outcome]) -> None:
        kinds = set(map(type, outcomes))
        # A nack's due time is later than any floor, unless a test's clock stands still.
        if GiveBack in kinds or (Nack in kinds and self._now() is not None):
            self._drop_floors()
        if not kinds <= {Ack, Reject}:
            self._wake()

    async def once(self, id: UUID, key: str, *, within: Any) -> bool:
        self._check_open()
        return await self._within(within, self._once(id, key))

    def once_sync(self, id: UUID, key: str, *, within: Any) -> bool:
        self._check_open()
        return self._within_sync(within, self._once(id, key))

    def _once(self, id_: UUID, key: str) -> Steps[bool]:
        return once(self.dialect, self.dialect.id_in(id_), check_text(key, "key"), self._now())

    # --- reap, wait, close --------------------------------------------------------------------------

    async def join(self, name: str | None = None) -> Presence:
        """Become a worker: from now on claims carry its mark, and others notice its death."""
        self._check_open()
        if self._presence is None or self._presence.left:
            presence = WorkerPresence(
                self._engine, name, by_lock=not self._options.pooler, now=self._now, meaning=self.meaning
            )
            give_up_at = monotonic() + self._reconnect_for
            try:
                while not await presence.beat():
                    if monotonic() > give_up_at:
                        raise StoreUnavailable(f"no sign of life gets through to {self.url}; join again")
                    await asyncio.sleep(_LOOK_AGAIN)
            except BaseException:
                await presence.leave()
                raise
            self._presence = presence
        return self._presence

    def _mark(self) -> int | None:
        return None if self._presence is None else self._presence.mark

    async def reap(self) -> int:
        """Give back what lapsed leases and, once this store has joined, dead workers hold; returns how many."""
        self._check_open()
        total = await self._reap_lapsed()
        if self._presence is not None:
            total += await reap_dead(self._engine, self._presence, self._run, self._now)
        if total:
            self._drop_floors()
            self._wake()
        return total

    async def _reap_lapsed(self) -> int:
        total, limit = 0, claiming.REAP_BATCH
        while True:
            ids = await self._run(
                lambda again, limit=limit: claiming.lapsed(self.dialect, self._leases, self._now(), limit),  # type: ignore[misc]
                Mode.READ,
            )
            if not ids:
                return total
            count = await self._run(
                lambda again, ids=ids: claiming.release_lapsed(self.dialect, ids, self._now()),  # type: ignore[misc]
                Mode.WRITE,
            )
            total += count
            if len(ids) < limit:
                return total
            if not count:
                limit *= 2  # those in front are held by others; there may be more behind them

    async def _reap_if_due(self) -> bool:
        """For people who claim without a worker: lapsed claims come back by the next claim that is not full."""
        if monotonic() - self._reaped_at < _REAP_EVERY and self._options.clock.now() is None:
            return False
        self._reaped_at = monotonic()
        if not await self._reap_lapsed():
            return False
        self._drop_floors()
        return True

    async def wait(self, queues: Sequence[str], timeout: Seconds) -> None:
        self._check_open()
        names = queue_names(queues)
        seconds = micros(timeout, "timeout") / SECOND
        event = asyncio.Event()
        self._waiting[event] = names
        self._listen()
        try:
            if self._fresh.intersection(names):
                return
            for queue in names:
                lanes = self._lanes.get(queue)
                if lanes is not None and lanes.known:
                    due = await self._run(partial(self._next_due, queue, lanes), Mode.READ)
                    if due is not None:
                        seconds = min(seconds, due / SECOND)
            await asyncio.wait_for(event.wait(), seconds)
        except TimeoutError:
            return
        finally:
            del self._waiting[event]

    def _next_due(self, queue: str, lanes: Lanes, again: bool) -> Steps[int | None]:
        return claiming.next_due(self.dialect, lanes, queue, self._now())

    async def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._wake()
            if self._listening is not None:
                self._listening.cancel()
                await asyncio.wait([self._listening])
            if self._presence is not None:
                await self._presence.leave()
            await self._engine.close()

    # --- inside -------------------------------------------------------------------------------------

    def _wake(self) -> None:
        for event in self._waiting:
            event.set()

    def _listen(self) -> None:
        if self._listening is None and self._options.notify:
            self._listening = asyncio.create_task(self._engine.listen(self.dialect.channel, self._heard))

    def _heard(self, queue: str | None) -> None:
        """A queue was announced; None: any may have been, while nobody listened."""
        if queue is not None:
            self._fresh.add(queue)
        for event, names in self._waiting.items():
            if queue is None or queue in names:
                event.set()

    def _due_again(self, queues: Iterable[str]) -> None:
        self._fresh.update(queues)
        self._drop_floors()
        self._wake()

    def _drop_floors(self) -> None:
        for lanes in self._lanes.values():
            lanes.fall()

    async def _within(self, connection: Any, steps: Steps[T]) -> T:
        return await outbox.run(self.dialect, connection, steps)

    def _within_sync(self, connection: Any, steps: Steps[T]) -> T:
        return outbox.run_sync(self.dialect, connection, steps)


def _looked_up(drafts: Sequence[Draft]) -> list[Draft]:
    """After a lost reply our own ids are looked up like those of callers."""
    return [d if d.given else Draft(d.id, True, *(getattr(d, f) for f in Draft.__struct_fields__[2:])) for d in drafts]
