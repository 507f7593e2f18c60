"""Claims over shards: each shard gets a share of the free slots, and none waits for another one.

A claim returns when the quick shards have answered. The answer of a slow one is kept for the next claim, and the shard
is not waited for until it is quick again. Messages that no claim takes soon go back, uncounted.

Claims are not merged: priority and order are exact on each shard only.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import NamedTuple

import msgspec

from millpond.clock import monotonic
from millpond.message import Claim, Receipt
from millpond.transports.database.store import DatabaseStore
from millpond.transports.sharded.give_back import GiveBackLater
from millpond.transports.sharded.members import first_error
from millpond.transports.sharded.shard import Shard

_GRACE = 0.25
"""Seconds after the first answer of another shard from which no claim waits for a shard."""
_LEAST_GRACE = 0.02
"""The same for a shard that takes much longer than the first: all would be claimed at its pace."""
_MUCH_LONGER = 4
_EMPTY_GRACE = 2.0
"""The same while no shard has a message: then there is nothing to delay, and an idle worker is to know that it is."""
_FIRST_WITHIN = 1.0
"""Seconds for which a claim waits for the first answer, if all shards are slow."""
_KEPT_FOR = 1.0
"""Longest time in seconds that late messages wait for the next claim, before they go back."""
_PROMPT = 0.25
"""Longest time in seconds that a claim waits until messages have gone back."""

ClaimOn = Callable[[Shard, DatabaseStore, int], Awaitable[list[Claim]]]


class ClaimKind(NamedTuple):
    """Claims of the same kind take the late messages of each other."""

    queues: tuple[str, ...]
    others: bool
    by_worker: bool


class _Asked:
    """A claim under way on one shard."""

    def __init__(self, shard: Shard, share: int, task: asyncio.Task[list[Claim]], *, late: bool) -> None:
        self.shard = shard
        self.share = share
        self.late = late
        """No claim waits for it."""
        self.task = task
        self.began = monotonic()

    @property
    def reserved(self) -> int:
        """Number of slots to leave free for its messages. Those of a late one are claimed next, before others."""
        return 0 if self.late else self.share


class _Kept(NamedTuple):
    """A message that no claim has returned yet, and the time at which it goes back."""

    claim: Claim
    until: float


class _Lane:
    """Claims of one kind."""

    def __init__(self) -> None:
        self.asked: dict[str, _Asked] = {}
        self.kept: list[_Kept] = []
        self.grace = _GRACE
        """Seconds for which the last claim waited for the slower shards."""

    def answered(self, seconds: float) -> None:
        """Note how long the first answer of a claim took."""
        self.grace = min(_GRACE, max(_LEAST_GRACE, _MUCH_LONGER * seconds))


class ShardedClaims:
    """Claims under way, and messages that came too late for the call that asked for them."""

    def __init__(self, shards: list[Shard]) -> None:
        self._shards = shards  # the same list: a guessed name may turn out to be another one
        self._turn = 0
        self._lanes: dict[ClaimKind, _Lane] = {}
        self._slow: set[str] = set()
        """Shards whose last answer was late."""
        self._back = GiveBackLater(shards)
        self._waiting: set[asyncio.Future[None]] = set()
        self._closed = False

    async def claim(
        self,
        kind: ClaimKind,
        limit: int,
        claim: ClaimOn,
        *,
        lease: float,
        suspects: bool = True,
        may_claim: Callable[[Shard], bool] = lambda shard: True,
    ) -> list[Claim]:
        """Claim up to `limit` messages. `lease`: in seconds. `may_claim`: whether to ask a shard at all."""
        lane = self._lanes.setdefault(kind, _Lane())
        self._turn += 1
        turn = self._turn % len(self._shards)
        more = [shard for shard in self._shards[turn:] + self._shards[:turn] if shard.claims_allowed]
        more = [shard for shard in more if may_claim(shard)]
        keep_for = min(_KEPT_FOR, lease / 2)
        errors: list[BaseException] = []
        answers = 0
        began = monotonic()
        answered_at: float | None = None
        try:
            while True:
                answers += self._take_answers(lane, more, errors, keep_for)
                wanted = limit - len(lane.kept) - sum(one.reserved for one in lane.asked.values())
                if wanted > 0:
                    free = [shard for shard in more if shard.name not in lane.asked]
                    for shard, share in zip(free, shares(wanted, len(free)), strict=False):
                        self._ask(lane, shard, share, claim, keep_for)
                pending = [one.task for one in lane.asked.values() if not one.late]
                if len(lane.kept) >= limit:
                    break
                if not pending:
                    if lane.kept or answers or not lane.asked:
                        break
                    # All are slow: the first answer is waited for.
                    pending = [one.task for one in lane.asked.values()]
                    left: float | None = _FIRST_WITHIN
                elif answered_at is None:
                    left = None
                else:
                    left = max(0.0, answered_at + (lane.grace if lane.kept else _EMPTY_GRACE) - monotonic())
                done, _ = await asyncio.wait(pending, timeout=left, return_when=asyncio.FIRST_COMPLETED)
                if not done:
                    break
                if answered_at is None:
                    lane.answered(monotonic() - began)
                answered_at = monotonic()
        finally:
            self._mark_late(lane)
        if not lane.kept and not answers and not lane.asked:
            raise first_error(errors) if errors else self._obstacle()
        return await self._take(lane, limit, suspects=suspects)

    def _ask(self, lane: _Lane, shard: Shard, share: int, claim: ClaimOn, keep_for: float) -> None:
        late = shard.name in self._slow or shard.breaker.is_open
        task = asyncio.create_task(shard.call(lambda store: claim(shard, store, share), watched=True))
        one = lane.asked[shard.name] = _Asked(shard, share, task, late=late)
        task.add_done_callback(lambda _: self._arrive(lane, one, keep_for))

    def _mark_late(self, lane: _Lane) -> None:
        for one in lane.asked.values():
            if not one.late and not one.task.done():
                one.late = True
                self._slow.add(one.shard.name)

    def _take_answers(self, lane: _Lane, more: list[Shard], errors: list[BaseException], keep_for: float) -> int:
        """Move the messages of finished claims to those that are kept; returns the number of answers."""
        answers = 0
        for name, one in list(lane.asked.items()):
            if not one.task.done():
                continue
            del lane.asked[name]
            if one.task.cancelled():
                continue
            error = one.task.exception()
            if error is not None:
                one.shard.claim_failed(error)
                errors.append(error)
                if one.shard in more:
                    more.remove(one.shard)
                continue
            one.shard.claim_succeeded()
            if monotonic() - one.began <= lane.grace:
                self._slow.discard(name)
            answers += 1
            claims, until = one.task.result(), monotonic() + keep_for
            lane.kept += [_Kept(on_shard(claim, name), until) for claim in claims]
            if len(claims) < one.share and one.shard in more:
                more.remove(one.shard)
        return answers

    def _arrive(self, lane: _Lane, one: _Asked, keep_for: float) -> None:
        """A claim ended. If no call waits for it, wake the next one, and give back what that does not take."""
        if not one.late or self._closed:
            return
        self._take_answers(lane, [], [], keep_for)
        if lane.kept:
            for waiting in self._waiting:
                if not waiting.done():
                    waiting.set_result(None)
            asyncio.get_running_loop().call_later(keep_for + 0.01, self._expire, lane)

    def _expire(self, lane: _Lane) -> None:
        now = monotonic()
        old = [claim for claim, until in lane.kept if until <= now]
        if old and not self._closed:
            lane.kept = [one for one in lane.kept if one.until > now]
            self._back.add(old)

    async def _take(self, lane: _Lane, limit: int, *, suspects: bool) -> list[Claim]:
        """Kept messages. A suspect is returned alone: claims of other shards go back, uncounted."""
        self._expire(lane)
        ready = sorted((one for one in lane.kept if suspects or not one.claim.suspect), key=_kept_order)
        left = [] if suspects else [one for one in lane.kept if one.claim.suspect]
        claims, lane.kept = [one.claim for one in ready[:limit]], ready[limit:] + left
        if lane.kept:
            asyncio.get_running_loop().call_later(_KEPT_FOR, self._expire, lane)
        suspect = next((claim for claim in claims if claim.suspect), None)
        if suspect is None or len(claims) == 1:
            return claims
        self._back.add([claim for claim in claims if claim is not suspect])
        try:
            await self._back.finished(within=_PROMPT)
        except BaseException:  # the caller is cancelled
            self._back.add([suspect])
            raise
        return [suspect]

    def give_back(self, claims: Sequence[Claim]) -> None:
        """Give back messages that cannot be returned."""
        self._back.add(claims)

    def _obstacle(self) -> BaseException:
        """The reason why no shard was asked."""
        failed = (shard.claim_error for shard in self._shards if shard.claim_error is not None)
        return next(failed, None) or self._shards[0].unavailable()

    def under_way(self, queues: Sequence[str]) -> set[str]:
        """Shards on which claims of these queues are under way."""
        wanted = set(queues)
        lanes = (lane for kind, lane in self._lanes.items() if wanted.intersection(kind.queues))
        return {name for lane in lanes for name in lane.asked}

    async def late_messages(self, queues: Sequence[str]) -> None:
        """Wait until there are late messages of these queues."""
        wanted = set(queues)
        while not any(lane.kept and wanted.intersection(kind.queues) for kind, lane in self._lanes.items()):
            waiting: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiting.add(waiting)
            try:
                await waiting
            finally:
                self._waiting.discard(waiting)

    async def close(self) -> None:
        """Give back late messages. A claim that is still under way is abandoned to its lease."""
        self._closed = True
        tasks = [one.task for lane in self._lanes.values() for one in lane.asked.values()]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=_FIRST_WITHIN)
        for lane in self._lanes.values():
            self._take_answers(lane, [], [], 0)
            self._back.add([one.claim for one in lane.kept])
        self._lanes.clear()
        await self._back.close()


def shares(limit: int, shards: int) -> list[int]:
    """Parts of the free slots, one for each of the first shards; at least 1.

    >>> shares(10, 3), shares(2, 3)
    ([4, 3, 3], [1, 1])
    """
    each, rest = divmod(limit, shards) if shards else (0, 0)
    return [part for n in range(shards) if (part := each + (n < rest))]


def claim_order(claim: Claim) -> tuple[int, int, int]:
    """The order of claims, among those of one call."""
    return claim.message.priority, claim.due_us, claim.receipt.id.int


def _kept_order(one: _Kept) -> tuple[int, int, int]:
    return claim_order(one.claim)


def on_shard(claim: Claim, shard: str) -> Claim:
    """The claim with a receipt that names its shard."""
    return msgspec.structs.replace(claim, receipt=Receipt(claim.receipt.id, claim.receipt.token, shard))
