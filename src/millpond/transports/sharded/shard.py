"""One shard: its store, connected when it first answers, behind a breaker."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import TypeVar

from millpond.clock import monotonic
from millpond.errors import Closed, ShardMapMismatch, ShardUnavailable, StoreUnavailable
from millpond.telemetry import Event
from millpond.transports.database.shards import PlacementCheck
from millpond.transports.database.store import DatabaseStore
from millpond.transports.shard_map import ShardMap, ShardRecord
from millpond.transports.sharded.breaker import Breaker
from millpond.transports.url import Url

T = TypeVar("T")
log = logging.getLogger("millpond")

ANSWER_WITHIN = 5.0
"""Seconds for which an operator's call waits for a shard before the shard counts as missing."""
_UNUSED = 10.0
"""Seconds without a call after which the connections to a shard are closed, if the pond has many shards."""
_SILENT_AFTER = 5.0
"""Seconds without an answer to a short statement from which a shard counts as missing."""

Connect = Callable[[Url], Awaitable[DatabaseStore]]


class Shard:
    """A database of the pond. While it does not answer, its calls fail at once and no other shard waits for it."""

    def __init__(self, url: Url, connect: Connect) -> None:
        self.url = url
        self.name = ""
        """Known once it has answered, or once all others have."""
        self.guessed = False
        """True while the name is a guess: several shards were away when the pond was connected."""
        self.on_name: Callable[[Shard, str], None] | None = None
        self.on_map: Callable[[ShardMap], object] | None = None
        self.map: ShardMap | None = None
        """The map of the pond, perhaps in another version than the shard has; None until it is known."""
        self.store: DatabaseStore | None = None
        self.on_event: Callable[[Event], None] | None = None
        self.breaker = Breaker()
        self.claim_error: BaseException | None = None
        """The error of its last claim, if it answers and refuses claims."""
        self._claiming = Breaker()
        """Pauses between claims that the shard refuses."""
        self.one_of_many = False
        """True in a pond of many shards: its connections are closed when they are not used."""
        self.attended = False
        """True while a worker holds it open: it is never closed for lack of use."""
        self._calls = 0
        self._used_at = 0.0
        self._rest: asyncio.TimerHandle | None = None
        self._resting: set[asyncio.Task[None]] = set()
        self._connect = connect
        self._connecting: asyncio.Lock = asyncio.Lock()
        self._closed = False

    def __repr__(self) -> str:
        return f"<Shard {self.name or '?'} {self.url}>"

    @property
    def available(self) -> bool:
        return self.breaker.allows()

    @property
    def claims_allowed(self) -> bool:
        return self.breaker.allows() and self._claiming.allows()

    def claim_failed(self, error: BaseException) -> None:
        """Record the error of a claim. One that is no silence, such as a missing right, is logged when it begins."""
        if isinstance(error, ShardUnavailable | Closed):
            return
        if self.claim_error is None or str(self.claim_error) != str(error):
            log.error("shard %s refuses claims, its messages wait: %s", self.name, error)
        self.claim_error = error
        self._claiming.failed()

    def claim_succeeded(self) -> None:
        if self.claim_error is not None:
            log.warning("shard %s takes claims again", self.name)
            self.claim_error = None
        self._claiming.succeeded()

    async def call(
        self,
        work: Callable[[DatabaseStore], Awaitable[T]],
        *,
        within: float | None = None,
        watched: bool = False,
        brief: bool = False,
    ) -> T:
        """Call the shard's store. `within`: seconds after which it counts as gone, and the call is cancelled.

        `watched`: the call is short. If no answer comes for some seconds, the shard counts as gone and the call goes
        on: only its caller waits.

        `brief`: the call is no use that keeps connections open. Such calls are repeated every few seconds.
        """
        if not self.breaker.allows():
            raise self.unavailable(unsent=True)
        self._calls += 1
        try:
            return await self._call(work, within, watched)
        finally:
            self._calls -= 1
            if not brief:
                self._used_at = monotonic()
            if self.one_of_many and self._rest is None:
                self._rest = asyncio.get_running_loop().call_later(_UNUSED, self._close_unused)

    async def _call(self, work: Callable[[DatabaseStore], Awaitable[T]], within: float | None, watched: bool) -> T:
        name = self.name
        watch = asyncio.get_running_loop().call_later(_SILENT_AFTER, self._silent) if watched else None
        unsent = True
        try:
            if self.breaker.is_open:
                await self._probe()
            async with asyncio.timeout(within) as limit:
                store = self.store or await self.connect()
                if name and self.name != name:
                    raise self.unavailable()  # the guess was wrong: the call is for another shard
                unsent = False
                result = await work(store)
        except (StoreUnavailable, TimeoutError) as e:
            if isinstance(e, TimeoutError) and not limit.expired():
                raise
            self._failed(str(e) or f"{within} s")
            raise self.unavailable(unsent=unsent or (isinstance(e, StoreUnavailable) and e.unsent)) from e
        finally:
            if watch is not None:
                watch.cancel()
        self._succeeded()
        return result

    async def _probe(self) -> None:
        """Ask a shard that was away whether it answers. The caller's own statement is sent only if it does."""
        self.breaker.begin()
        try:
            async with asyncio.timeout(ANSWER_WITHIN):
                store = self.store or await self.connect()
                await store.shards.record()
        except (StoreUnavailable, TimeoutError) as e:
            self.breaker.failed()
            raise self.unavailable() from e
        finally:
            self.breaker.end()
        self._succeeded()

    def _silent(self) -> None:
        self._failed(f"no answer for {_SILENT_AFTER:g} s")

    def _failed(self, why: str) -> None:
        if not self.breaker.is_open:
            log.warning("shard %s does not answer: %s", self.name or self.url, why)
        self.breaker.failed()

    def _succeeded(self) -> None:
        if self.breaker.is_open:
            log.warning("shard %s answers again", self.name)
        self.breaker.succeeded()

    def unavailable(self, *, unsent: bool = False) -> ShardUnavailable:
        return ShardUnavailable(
            f"shard {self.name or '?'} at {self.url} does not answer; messages of other shards are not affected. The "
            "call may be made again",
            self.name,
            unsent=unsent,
        )

    async def connect(self) -> DatabaseStore:
        async with self._connecting:
            if self._closed:
                raise _closed()
            if self.store is None:
                store = await self._connect(self.url)
                try:
                    record = await store.shards.record()
                    if self._closed:
                        raise _closed()
                    self._check(record)
                    if self.on_map is not None and record is not None:
                        self.on_map(record.map)  # perhaps a newer version
                except BaseException:
                    await store.close()
                    raise
                assert record is not None
                store.shard = None  # this handle routes its messages
                store.placement = PlacementCheck(store.dialect, record)
                store.on_event = self.on_event
                if self.guessed and record.name != self.name and self.on_name is not None:
                    self.on_name(self, record.name)
                if self.map is None:
                    self.map = record.map
                self.name, self.store, self.guessed = record.name, store, False
            return self.store

    def _check(self, record: ShardRecord | None) -> None:
        if record is None:
            raise no_map(self.url)
        if self.map is not None and (
            not same_pond(record.map, self.map) or (self.name and not self.guessed and record.name != self.name)
        ):
            raise mismatch(self.url, record, self.map)

    def _close_unused(self) -> None:
        self._rest = None
        if self._calls or self.attended or self.store is None:
            return
        if (left := self._used_at + _UNUSED - monotonic()) > 0:
            self._rest = asyncio.get_running_loop().call_later(left, self._close_unused)
            return
        resting = asyncio.create_task(self.rest())
        self._resting.add(resting)
        resting.add_done_callback(self._resting.discard)

    async def rest(self) -> None:
        """Close the connections, unless they are in use. The next call opens them."""
        if not self._calls and not self.attended and self.store is not None:
            store, self.store = self.store, None
            await store.close()

    async def close(self) -> None:
        if self._rest is not None:
            self._rest.cancel()
        self._closed = True  # a call that waits for the end of a change of the map connects no more
        try:
            async with self._connecting:
                pass
        finally:  # also if the caller is cancelled: a call that still connects closes what it opened
            if self.store is not None:
                await self.store.close()


def _closed() -> Closed:
    return Closed("this pond of several shards was closed; connect again")


def same_pond(one: ShardMap, other: ShardMap) -> bool:
    """Whether both are the same map, or two versions of it: while it is changed, shards have different ones."""
    return one == other or (one.pond == other.pond and one.version != other.version)


def no_map(url: Url) -> ShardMapMismatch:
    return ShardMapMismatch(
        f"the database at {url} has no shard map; run once, with the URLs of all shards: millpond shards init"
    )


def mismatch(url: Url, record: ShardRecord, other: ShardMap) -> ShardMapMismatch:
    if record.map.pond != other.pond:
        return ShardMapMismatch(
            f"the database at {url} is shard {record.name!r} of another shard map than the other URLs; give the "
            "URLs of one map (millpond shards status prints them)"
        )
    return ShardMapMismatch(
        f"the database at {url} is shard {record.name!r} with version {record.map.version} of the shard map, which "
        f"does not fit to version {other.version} of the other URLs; millpond shards status prints them"
    )
