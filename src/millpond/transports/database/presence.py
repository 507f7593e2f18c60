"""Worker death: a lock that dies with its worker, and a beat that says the worker is still at it.

A free lock alone proves nothing, since a restart, a failover or a pooler frees the locks of the living; nor
does a stale beat, since a busy database delays it. Dead is who shows both, on two looks half a second apart,
to a reaper that holds a lock of its own on this very server, and has done so for a while. Everybody else is
judged by leases alone.

Steps know nothing of connections; `WorkerPresence` alone keeps a session.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import socket
from collections import deque
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

import msgspec

from millpond.clock import SECOND, monotonic
from millpond.message import check_name
from millpond.transports.database import claim as claiming
from millpond.transports.database import statements as sql
from millpond.transports.database.dialect import Dialect, Trouble
from millpond.transports.database.engine import Engine, Mode, Session
from millpond.transports.database.statement import Query, Steps

BEAT_EVERY = 0.5
"""How often a worker should beat."""
STALE_US = 1_200_000
LOOKS_APART = 0.5
_STEADY = 2.5
"""Seconds that a reaper's own lock must have been held: by then the living have retaken theirs."""
_PATIENT = 10.0
"""The same for judging workers that have not beaten since: they may be slower to find a restarted server."""
_FORGET_US = 3600 * SECOND
"""When to forget a silent worker whose lock says nothing."""
_BEAT_WITHIN = 5.0
_SESSIONS, _WITHIN = 5, 60.0
"""So many sessions in so many seconds, and a worker's lock says nothing of its life."""

BEAT = """
INSERT INTO {worker} (id, name, started_at, beat_at, by_lock) VALUES (:id, :name, {now}, {now}, :by_lock) {or_beat}
"""
SESSION = "SELECT {session}, {now}"
TAKE_LOCK = "SELECT {take_lock}"
FORGET = "DELETE FROM {worker} WHERE id = :id"
SILENT = "SELECT count(*) FROM {worker} WHERE id <> :me AND beat_at < {now} - :stale"
LOOK = """
SELECT w.id, CASE WHEN {lock_held} THEN 1 ELSE 0 END, w.by_lock, w.beat_at, {now} FROM {worker} w
WHERE w.id = :me OR w.beat_at < {now} - :stale
"""


Run = Callable[[Callable[[bool], Steps[Any]], Mode], Awaitable[Any]]
"""Runs steps on the store's connections; see `Running`."""


class Held(msgspec.Struct, frozen=True):
    """Our lock as one server session holds it."""

    session: int
    since_us: int
    """By the database's clock."""
    since: float


class Verdict(msgspec.Struct, frozen=True):
    """What one look found."""

    dead: frozenset[int] = frozenset()
    forgotten: frozenset[int] = frozenset()


def beat(
    d: Dialect, me: int, name: str, held: Held | None, *, by_lock: bool, now: int | None
) -> Steps[tuple[Held | None, bool]]:
    """Take the lock unless this session has it, and beat; also says whether the server's session changed."""
    if by_lock:
        session, at = (yield Query(d.sql(SESSION), {"now": now}))[0]
        if held is None:
            taken = (yield Query(d.sql(TAKE_LOCK), {"worker": me}))[0][0]
            # Not taken: an earlier session of ours holds it, whose end the server has not noticed yet.
            held = Held(session, at, monotonic()) if taken else None
        elif held.session != session:
            return None, True
    yield Query(d.sql(BEAT), {"id": me, "name": name, "by_lock": int(by_lock), "now": now})
    return held, False


def look(d: Dialect, me: int, held: Held, now: int | None) -> Steps[Verdict]:
    """Whose lock is free and whose beat is stale, as far as we may judge."""
    params = {"me": me, "stale": STALE_US, "now": now}
    if not (yield Query(d.sql(SILENT), params))[0][0]:
        return Verdict()
    rows = yield Query(d.sql(LOOK), params)
    if not any(id_ == me and held_ for id_, held_, *_ in rows):
        return Verdict()  # ours is gone too: the server was restarted, or this is another one
    patient = monotonic() - held.since >= _PATIENT
    dead, forgotten = set(), set()
    for id_, lock_held, by_lock, beat_at, at in rows:
        if by_lock and not lock_held and (patient or beat_at >= held.since_us):
            dead.add(id_)
        elif not by_lock and beat_at < at - _FORGET_US:
            forgotten.add(id_)
    return Verdict(frozenset(dead), frozenset(forgotten))


def forget(d: Dialect, worker: int) -> Steps[None]:
    yield Query(d.sql(FORGET), {"id": worker})


def release_held_by(d: Dialect, worker: int) -> Steps[tuple[int, int]]:
    """Give back a batch of what a dead worker holds: how many were found, and how many given back.

    Found without locks and locked by id, so that living workers' rows on the way are not touched; those
    that somebody else has locked, a caller's transaction that acks, are left for later.
    """
    found = yield Query(d.sql(sql.HELD_BY), {"worker": worker, "limit": claiming.REAP_BATCH})
    if not found:
        return 0, 0
    rows = yield Query(d.sql(sql.LOCK_HELD_BY), {"worker": worker, "ids": [row[0] for row in found]})
    return len(found), (yield from claiming.release(d, rows))


async def reap_dead(engine: Engine, presence: WorkerPresence, run: Run, now: Callable[[], int | None]) -> int:
    """Give back what dead workers hold; returns how many."""
    d = engine.dialect
    held = presence.judging
    if held is None:
        return 0

    def looking(again: bool) -> Steps[Verdict]:
        if presence.judging is not held:
            return Verdict()  # our own lock was lost meanwhile, or does not get through
        return (yield from look(d, presence.id, held, now()))

    def releasing(worker: int, again: bool) -> Steps[tuple[int, int]]:
        # A third look, in the same transaction: this call may have waited for the network since the second one,
        # and the living whom it had cut off as well are back.
        verdict = yield from looking(again)
        return (yield from release_held_by(d, worker)) if worker in verdict.dead else (1, 0)

    async def done_with(worker: int) -> None:
        # Its row goes last: by that it is found again if we do not come to the end of this.
        await engine.discard(worker)
        await run(lambda again: forget(d, worker), Mode.WRITE)

    first: Verdict = await run(looking, Mode.READ)
    for worker in first.forgotten:
        await done_with(worker)
    if not first.dead:
        return 0
    await asyncio.sleep(LOOKS_APART)
    second: Verdict = await run(looking, Mode.READ)
    total = 0
    for worker in first.dead & second.dead:
        found = given_back = 1
        while found and given_back:
            found, given_back = await run(partial(releasing, worker), Mode.WRITE)
            total += given_back
        if not found:
            await done_with(worker)
    return total


class WorkerPresence:
    """One worker's lock and beat.

    It belongs to the event loop that beats, which may be another one than the store's, in another thread: then
    leave from there too, after the last beat.
    """

    def __init__(
        self,
        engine: Engine,
        name: str | None,
        *,
        by_lock: bool,
        now: Callable[[], int | None],
        meaning: Callable[[Exception, Trouble], Exception],
    ) -> None:
        self.id = secrets.randbits(62)
        self.name = check_name(name or f"{socket.gethostname()}:{os.getpid()}", "worker name")
        self._engine = engine
        self._now = now
        self._meaning = meaning
        self._by_lock = by_lock
        self._session: Session | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._turn = asyncio.Lock()
        self._held: Held | None = None
        self._opened: deque[float] = deque(maxlen=_SESSIONS)
        self._alive = False
        self.left = False

    def __repr__(self) -> str:
        return f"<Presence {self.name} {self.id}>"

    @property
    def mark(self) -> int | None:
        """What claims carry: while no sign of life gets through, nothing, so that only their leases count."""
        return self.id if self._alive else None

    async def beat(self) -> bool:
        if self._loop is not asyncio.get_running_loop():
            await self._move_in()
        try:
            async with self._turn, asyncio.timeout(_BEAT_WITHIN):
                self._alive = await self._beat()
        except asyncio.CancelledError:
            self._alive = False
            await self._drop()  # in the middle of a statement, perhaps
            raise
        except Exception as e:
            self._alive = False
            trouble = self._engine.dialect.trouble(e)
            if trouble is Trouble.BUSY or (trouble is Trouble.FOREIGN and isinstance(e, TimeoutError)):
                return False  # a file's lock does not break; only its database is slow
            await self._drop()
            if trouble is not Trouble.LOST:
                raise self._meaning(e, trouble) from e
        return self._alive

    async def _beat(self) -> bool:
        if self.left:
            return False
        if self._session is None:
            self._session = await self._engine.hold(self.id)
            self._opened.append(monotonic())
        held, changed = await self._session.run(
            lambda: beat(self._engine.dialect, self.id, self.name, self._held, by_lock=self._by_lock, now=self._now())
        )
        often = len(self._opened) == _SESSIONS and monotonic() - self._opened[0] < _WITHIN
        if changed or (often and self._by_lock):
            # One connection and two sessions: a transaction pooler. Its locks say nothing of us.
            self._by_lock, self._held = False, None
            return await self._beat()
        self._held = held
        return True

    @property
    def judging(self) -> Held | None:
        """Our lock, if it has been held for long enough to judge others."""
        held = self._held
        return held if held is not None and self._alive and monotonic() - held.since >= _STEADY else None

    async def leave(self) -> None:
        """Remove the row, then free the lock. Claims stay as they are until settled, or until they lapse."""
        self.left, self._alive = True, False
        if self._session is not None:
            # Without a connection the row stays, for a reaper to remove.
            with contextlib.suppress(Exception):
                async with self._turn, asyncio.timeout(_BEAT_WITHIN):
                    await self._session.run(lambda: forget(self._engine.dialect, self.id))
        await self._drop()
        await self._engine.discard(self.id)

    async def _move_in(self) -> None:
        """A connection lives in one loop: when another begins to beat, it gets a session of its own."""
        session, loop = self._session, self._loop
        self._session, self._held = None, None
        self._loop, self._turn = asyncio.get_running_loop(), asyncio.Lock()
        if session is not None and loop is not None and not loop.is_closed():
            asyncio.run_coroutine_threadsafe(session.close(), loop)

    async def _drop(self) -> None:
        session, self._session, self._held = self._session, None, None
        if session is not None:
            with contextlib.suppress(Exception):
                await session.close()
