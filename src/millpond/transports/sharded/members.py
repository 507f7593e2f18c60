"""The shards of a pond, and calls to all of them at once."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from typing import NamedTuple, TypeVar

from millpond.clock import monotonic
from millpond.errors import ShardMapChanged, ShardMapMismatch, ShardUnavailable
from millpond.loop import Backoff
from millpond.message import Receipt
from millpond.transports.database.store import DatabaseStore
from millpond.transports.shard_map import ShardMap
from millpond.transports.sharded.shard import ANSWER_WITHIN, Shard

T = TypeVar("T")
log = logging.getLogger("millpond")

AT_ONCE = 16
"""Number of shards that a worker attends at once, and that a call to all shards asks at once."""
_WRITE_WITHIN = 10.0
"""Seconds for which a call by receipts of several shards waits for each of them."""


class Settled(NamedTuple):
    """The result of a call by receipts."""

    refused: list[Receipt]
    """Stale receipts."""
    errors: Mapping[str, BaseException]
    """Errors by the name of the shard."""
    unknown: Sequence[Receipt] = ()
    """Receipts without a shard that may belong to one that does not answer."""


class Members:
    """Shards by name, and the map."""

    def __init__(
        self, shards: Sequence[Shard], map_: ShardMap, claimed: Sequence[str], *, change_within: float = 30.0
    ) -> None:
        self.map = map_
        """The newest version that is known. Shards that joined after this handle was connected have no URL here."""
        self.change_within = change_within
        """Seconds for which a call waits for the end of a change of the map."""
        by_name = {shard.name: shard for shard in shards}
        self.shards = [by_name[name] for name in map_.shards]
        self._by_name = by_name
        self.chosen = [by_name[name] for name in claimed]
        """The shards that this handle may claim from."""
        self.claimed = list(self.chosen)
        """Those that it claims from now: a worker attends a bounded number of them at once."""
        self._at_once = asyncio.Semaphore(AT_ONCE)
        for shard in shards:
            shard.on_name = self._swap
            shard.on_map = self.adopt
            shard.one_of_many = self.many

    def adopt(self, map_: ShardMap) -> bool:
        """Use a newer version of the map. Returns whether it is one."""
        if map_.version <= self.map.version:
            return False
        self.map = map_
        for shard in self.shards:
            shard.map = map_
        return True

    async def follow(self, work: Callable[[], Awaitable[T]], *, within: float | None = None) -> T:
        """Do work again that an old map led to a wrong shard, until the new owner accepts it."""
        give_up_at = monotonic() + (self.change_within if within is None else within)
        backoff = Backoff(0.01, 0.2)
        while True:
            try:
                return await work()
            except ShardMapChanged as e:
                # Without a newer map: the new owner does not accept it yet.
                if e.map is None or not self.adopt(e.map):
                    if monotonic() >= give_up_at:
                        raise
                    await asyncio.sleep(backoff.next())

    def _swap(self, shard: Shard, name: str) -> None:
        """A guessed name was wrong: the shard with that name gets the guess."""
        other, guess = self._by_name[name], shard.name
        chosen, claimed = [one.name for one in self.chosen], [one.name for one in self.claimed]
        shard.name, other.name = name, guess
        self._by_name[name], self._by_name[guess] = shard, other
        self.shards[:] = [self._by_name[one] for one in self.map.shards if one in self]
        self.chosen[:] = [self._by_name[one] for one in chosen]
        self.claimed[:] = [self._by_name[one] for one in claimed]

    def __getitem__(self, name: str) -> Shard:
        if name not in self:
            raise ShardMapMismatch(
                f"version {self.map.version} of the shard map has the shard {name!r}, which is none of the URLs; "
                "connect again with the URLs of all shards"
            )
        return self._by_name[name]

    def __contains__(self, name: object) -> bool:
        return name in self._by_name

    @property
    def missing(self) -> tuple[str, ...]:
        """Names of the shards that did not answer their last call, or that have no URL here."""
        return (*(shard.name for shard in self.shards if shard.breaker.is_open), *self._unknown)

    @property
    def _unknown(self) -> list[str]:
        return [name for name in self.map.shards if name not in self]

    @property
    def many(self) -> bool:
        """Whether there are too many shards to hold connections to all of them."""
        return len(self.shards) > AT_ONCE

    @property
    def attended(self) -> Sequence[Shard]:
        """The shards for which a worker does its chores: all of them, or those that it attends."""
        return self.claimed if self.many else self.shards

    async def _on_all(
        self, work: Callable[[DatabaseStore], Awaitable[T]], within: float | None, shards: Sequence[Shard] | None = None
    ) -> list[T | BaseException]:
        """The answers and errors of all shards. Of many shards only some are asked at once."""

        async def on(shard: Shard) -> T:
            if not self.many:
                return await shard.call(work, within=within)
            async with self._at_once:
                return await briefly(shard, work, within=within)

        return await asyncio.gather(*map(on, self.shards if shards is None else shards), return_exceptions=True)

    async def ask(
        self,
        work: Callable[[DatabaseStore], Awaitable[T]],
        *,
        within: float | None = ANSWER_WITHIN,
        shards: Sequence[Shard] | None = None,
    ) -> list[T]:
        """The answers of all shards that answer, or of the given ones. If none does, the error is raised."""
        results = await self._on_all(work, within, shards)
        answers: list[T] = []
        for result in results:
            if isinstance(result, BaseException):
                if not isinstance(result, ShardUnavailable):
                    raise result
            else:
                answers.append(result)
        if not answers:
            raise next(result for result in results if isinstance(result, BaseException))
        return answers

    async def tell(self, work: Callable[[DatabaseStore], Awaitable[T]]) -> list[T]:
        """Call all shards. The error names those that could not be reached; all others have done it."""
        results = await self._on_all(work, ANSWER_WITHIN)
        done: list[T] = []
        away = self._unknown
        for shard, result in zip(self.shards, results, strict=True):
            if isinstance(result, BaseException):
                if not isinstance(result, ShardUnavailable):
                    raise result
                away.append(shard.name)
            else:
                done.append(result)
        if away:
            raise ShardUnavailable(
                f"not done on the shards {', '.join(away)}, which do not answer or are none of the URLs, but on all "
                "others; call again when they are back, or with all URLs"
            )
        return done

    async def by_receipt(
        self,
        items: Sequence[T],
        receipt: Callable[[T], Receipt],
        work: Callable[[DatabaseStore, list[T]], Awaitable[list[Receipt]]],
    ) -> Settled:
        """Let each shard work on the items of its receipts.

        A receipt without a shard, as another program may have kept it, is tried on each shard in turn.
        """
        parts: dict[str, list[T]] = {}
        unknown: list[T] = []
        for item in items:
            name = receipt(item).shard
            if name in self:
                parts.setdefault(str(name), []).append(item)
            else:
                unknown.append(item)
        errors: dict[str, BaseException] = {}

        async def on(name: str, part: list[T]) -> list[Receipt]:
            # A silent shard delays the others for a limited time, and only once: then it counts as missing.
            within = _WRITE_WITHIN if len(parts) > 1 else None
            stale = await self[name].call(lambda store: work(store, part), within=within, watched=True)
            if not stale:
                return []
            given = {(receipt(item).id, receipt(item).token): receipt(item) for item in part}
            return [given.get((one.id, one.token), one) for one in stale]

        refused: list[Receipt] = []
        names = list(parts)
        for name, result in zip(
            names, await asyncio.gather(*(on(name, parts[name]) for name in names), return_exceptions=True), strict=True
        ):
            if isinstance(result, BaseException):
                errors[name] = result
            else:
                refused += result
        away: dict[str, BaseException] = {}
        for shard in self.shards:
            if not unknown:
                break
            try:
                stale = set(await on(shard.name, unknown))
            except ShardUnavailable as e:  # the message may be on another shard
                away[shard.name] = e
                continue
            unknown = [item for item in unknown if receipt(item) in stale]
        if unknown and away:
            return Settled(refused, {**away, **errors}, [receipt(item) for item in unknown])
        return Settled(refused + [receipt(item) for item in unknown], errors)


async def briefly(shard: Shard, work: Callable[[DatabaseStore], Awaitable[T]], *, within: float | None) -> T:
    """Call a shard, and close the connections that only this call needed."""
    was_open = shard.store is not None
    try:
        return await shard.call(work, within=within, brief=True)
    finally:
        if not was_open:
            await shard.rest()


def first_error(errors: Iterable[BaseException]) -> BaseException:
    """The error that a caller can act on least by waiting, otherwise the first."""
    found = list(errors)
    return next((error for error in found if not isinstance(error, ShardUnavailable)), found[0])
