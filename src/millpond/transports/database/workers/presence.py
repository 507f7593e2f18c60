"""A worker's row, lock and heartbeat.

The row holds all claims of the worker: one beat extends all their leases. The lock ends with its worker. A free lock
alone proves nothing: a restart, a failover or a pooler frees the locks of living workers (`dead_workers.py`).

Steps know no connections; only `WorkerPresence` has a session.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import socket
from collections import deque
from collections.abc import Sequence
from functools import partial
from typing import Any

import msgspec

from millpond.clock import SECOND, Seconds, monotonic
from millpond.message import check_name
from millpond.seam.workers import DEAD_AFTER, check_dead_after
from millpond.transports.database.messages.reap import release_all
from millpond.transports.database.messages.refused_rows import RefusedRows
from millpond.transports.database.runner import Runner, Session
from millpond.transports.database.sql.dialect import Dialect, ErrorKind
from millpond.transports.database.sql.statement import Query, Steps
from millpond.transports.database.workers.release import FOREVER, detach_held, forget, held_ids
from millpond.transports.database.workers.unreturned_claims import Unreturned

_STEADY = 2.5
"""Seconds that a reaper's own lock must have been held: by then living workers have retaken theirs."""
_BEATS_APART = 2.0
"""Most seconds between two beats of a reaper that judges others: while its own are late, theirs may be late too."""
_BEAT_WITHIN = 5.0
_SESSIONS, _WITHIN = 5, 60.0
"""This many sessions within this many seconds mean that the worker's lock proves nothing, until they are past."""

# One row, however many messages the worker holds. It is inserted again if a reaper has removed it.
BEAT = """
INSERT INTO {worker} (id, name, started_at, beat_at, beats, dead_after, lease, by_lock, stopping, queues)
VALUES (:id, :name, {now}, {now}, :beats, :dead_after, :lease, :by_lock, :stopping, :queues) {or_beat}
"""
SESSION = "SELECT {session}"
TAKE_LOCK = "SELECT {take_lock}"


class HeldLock(msgspec.Struct, frozen=True):
    """Our lock as one server session holds it."""

    session: int
    since: float


class Tenure(msgspec.Struct, frozen=True):
    """A time in which our beats succeed without a break, in one session if it holds our lock."""

    lock: HeldLock | None
    since: float


def beat(
    d: Dialect, row: dict[str, object], held: HeldLock | None, now: int | None
) -> Steps[tuple[HeldLock | None, bool]]:
    """Take the lock unless this session has it, and beat; also returns whether the server's session changed."""
    if row["by_lock"]:
        session = (yield Query(d.sql(SESSION), {}))[0][0]
        if held is None:
            taken = (yield Query(d.sql(TAKE_LOCK), {"worker": row["id"]}))[0][0]
            # Not taken: our earlier session holds it, and the server has not noticed its end yet.
            held = HeldLock(session, monotonic()) if taken else None
        elif held.session != session:
            return None, True
    yield Query(d.sql(BEAT), {**row, "now": now})
    return held, False


class WorkerPresence:
    """One worker's row, lock and heartbeat.

    It belongs to the event loop that beats. That may be another one than the store's, in another thread: then call
    `leave` there too, after the last beat.
    """

    def __init__(
        self,
        runner: Runner,
        name: str | None,
        dead_after: Seconds = DEAD_AFTER,
        queues: Sequence[str] | None = None,
        *,
        unreturned: Unreturned,
    ) -> None:
        self._queues: str | None = None
        if queues is not None:
            self.consume(queues)
        self.id = secrets.randbits(62)
        self.dead_after = check_dead_after(dead_after)
        self.name = check_name(name or f"{socket.gethostname()}:{os.getpid()}", "worker name")
        self._runner = runner
        self._engine = runner.engine
        self._unreturned = unreturned
        self._by_lock = self._lock_proves = not runner.options.pooler
        self._session: Session | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._lock = asyncio.Lock()
        self._held: HeldLock | None = None
        self._opened: deque[float] = deque(maxlen=_SESSIONS)
        self._alive = False
        self._beats = secrets.randbits(32)
        self._last_beat = self._beating_since = 0.0
        self._lease = 0
        self._stopping = False
        self.left = False

    def __repr__(self) -> str:
        return f"<Presence {self.name} {self.id}>"

    @property
    def mark(self) -> int | None:
        """The mark of claims with separate leases; None while no heartbeat succeeds, when only leases count."""
        return self.id if self._alive else None

    @property
    def doubtful(self) -> dict[str, int]:
        return {}  # one database has no shards

    def trust(self, shard: str, silence: int) -> None:
        """Nothing is in doubt."""

    @property
    def cut_off(self) -> tuple[str, ...]:
        return ()

    def will_hold(self, lease: int) -> None:
        """Let the next beat record the shortest lease of the claims that the row holds, in microseconds."""
        self._lease = min(self._lease or lease, lease)

    async def beat(self) -> bool:
        if self._loop is not asyncio.get_running_loop():
            await self._change_loop()
        try:
            async with self._lock, asyncio.timeout(_BEAT_WITHIN):
                self._alive = await self._beat()
                if self._session is not None:
                    await self._unreturned.give_back(self.id, self._session)
        except asyncio.CancelledError:
            self._alive = False
            await self._drop()  # it may be in the middle of a statement
            raise
        except Exception as e:
            self._alive = False
            kind = self._engine.dialect.error_kind(e)
            if kind is ErrorKind.BUSY or (kind is ErrorKind.FOREIGN and isinstance(e, TimeoutError)):
                return False  # the lock of a file does not break; its database is slow
            await self._drop()
            if kind is not ErrorKind.LOST:
                raise self._runner.translated(e, kind) from e
        return self._alive

    async def _beat(self) -> bool:
        if self.left:
            return False
        if self._session is None:
            self._session = await self._engine.hold(self.id)
            self._opened.append(monotonic())
        elif self._lock_proves and not self._by_lock and monotonic() - self._opened[-1] >= _WITHIN:
            self._by_lock = True  # the network was bad for a while; this session lasts
            self._opened.clear()
        self._beats += 1
        row: dict[str, object] = {
            "id": self.id,
            "name": self.name,
            "beats": self._beats,
            "dead_after": round(self.dead_after * SECOND),
            "lease": self._lease,
            "by_lock": int(self._by_lock),
            "stopping": int(self._stopping),
            "queues": self._queues,
        }
        d, now = self._engine.dialect, self._runner.now()
        held, changed = await self._session.run(partial(beat, d, row, self._held, now))
        often = len(self._opened) == _SESSIONS and monotonic() - self._opened[0] < _WITHIN
        if changed or (often and self._by_lock):
            # One connection with two sessions: a transaction pooler. Its locks never prove anything.
            self._lock_proves = self._lock_proves and not changed
            self._by_lock, self._held = False, None
            return await self._beat()
        self._held = held
        at = monotonic()
        if at - self._last_beat > _BEATS_APART:
            self._beating_since = at
        self._last_beat = at
        return True

    @property
    def tenure(self) -> Tenure | None:
        """Our tenure, if it has lasted long enough to judge other workers."""
        held, now = self._held, monotonic()
        if not self._alive or now - self._last_beat > _BEATS_APART:
            return None
        tenure = Tenure(held, max(self._beating_since, 0.0 if held is None else held.since))
        return tenure if now - tenure.since >= _STEADY else None

    def consume(self, queues: Sequence[str]) -> None:
        self._queues = msgspec.json.encode(queues).decode()

    def announce_stop(self) -> None:
        self._stopping = True

    async def leave(self) -> None:
        """Remove the row, then free the lock. Claims that it still holds get separate leases."""
        self.left, self._alive = True, False
        try:
            if self._session is not None:
                d = self._engine.dialect
                # Without a connection the row stays until a reaper removes it.
                with contextlib.suppress(Exception):
                    async with self._lock, asyncio.timeout(_BEAT_WITHIN):
                        await self._detach_held(self._session)
                        await self._session.run(lambda: forget(d, self.id))
        finally:  # also if the caller is cancelled
            await self._drop()
        await self._engine.discard(self.id)

    async def _detach_held(self, session: Session) -> None:
        d = self._engine.dialect

        async def find(limit: int) -> list[Any]:
            return await session.run(partial(held_ids, d, self.id, FOREVER, limit))

        async def detach(ids: Sequence[Any]) -> int:
            return await session.run(partial(detach_held, d, self.id, ids, self._runner.now()))

        await release_all(RefusedRows("messages that the database refuses to detach"), find, detach)

    async def _change_loop(self) -> None:
        """Open another session when another event loop begins to beat, if a session belongs to one loop.

        The earlier loop may be blocked by a handler: nothing waits for it.
        """
        session, loop = self._session, self._loop
        self._loop, self._lock = asyncio.get_running_loop(), asyncio.Lock()
        if session is not None and session.any_loop:
            return
        self._session, self._held = None, None
        if session is not None and loop is not None and not loop.is_closed():
            asyncio.run_coroutine_threadsafe(session.close(), loop)

    async def _drop(self) -> None:
        session, self._session, self._held = self._session, None, None
        if session is not None:
            with contextlib.suppress(Exception):
                await session.close()
