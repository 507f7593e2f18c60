"""Dead and hung workers, and the release of their messages.

A worker is dead if its lock is free and it is silent for `dead_after`. A free lock alone proves nothing: a restart, a
failover or a pooler frees the locks of living workers. Nor does silence: a busy database delays beats. Therefore the
lock must be free in two checks half a second apart, made by a reaper that has held its own lock on the same server for
some seconds. A worker is hung, by its silence alone, while that is longer than a lease: it loses those messages.

A reaper counts the silence of others only while its own beats succeed. An outage that hits all workers is silence of
none of them. It never judges itself.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import msgspec

from millpond.clock import SECOND, monotonic
from millpond.transports.database.messages.reap import release_all
from millpond.transports.database.messages.refused_rows import RefusedRows
from millpond.transports.database.runner import Runner
from millpond.transports.database.sql.dialect import Dialect
from millpond.transports.database.sql.statement import Query, Steps
from millpond.transports.database.workers.first_error import FirstError
from millpond.transports.database.workers.presence import Tenure, WorkerPresence
from millpond.transports.database.workers.release import (
    FOREVER,
    forget_silent,
    held_ids,
    own_ids,
    release_held,
    release_own,
    still_silent,
)
from millpond.transports.database.workers.silence import FRESH, Beat, Silence, Silent

_CHECKS_APART = 0.5
_BETWEEN_BEATS = 0.5
"""Seconds. A worker may have beaten this long before it was cut off, and is to have `dead_after` from then on."""
_SOON = 1.0
"""Seconds that a reaper waits for the end of `dead_after`, instead of leaving it to the next round."""
_PATIENT = 10.0
"""Seconds of tenure before a worker without a beat in it is dead: it may be slower to find a restarted server."""
_FORGET_AFTER = 3600.0
"""Seconds of silence after which a worker whose lock proves nothing is forgotten."""

# Our own row is among them: it has the database's time.
_SILENT = f"""
SELECT w.id, w.beats, w.dead_after, w.lease, w.by_lock, {{now}} - w.beat_at, {{now}} FROM {{worker}} w
WHERE w.id = :me OR w.beat_at < {{now}} - {round(FRESH * SECOND)} OR w.beat_at > {{now}}
"""
_LOCKS = "SELECT w.id, CASE WHEN {lock_held} THEN 1 ELSE 0 END FROM {worker} w WHERE w.id {workers}"


class SilentWorker(msgspec.Struct, frozen=True):
    """A worker whose last beat is not fresh. Times are seconds."""

    id: int
    beats: int
    dead_after: float
    lease: float
    """The shortest lease of the claims that its row holds."""
    by_lock: bool
    age: float
    """Age of the last beat by the database's clock, which may have made a step."""
    silence: Silent = Silent(0.0, False)

    @property
    def dead_in(self) -> float:
        """Seconds until it is dead, if its lock is free and it stays silent."""
        return self.dead_after + _BETWEEN_BEATS - self.silence.seconds


def silent_workers(d: Dialect, me: int, now: int | None) -> Steps[tuple[list[SilentWorker], int | None]]:
    """The workers whose last beat is not fresh, and the database's time; None if our own row is gone."""
    at, found = None, []
    for id_, beats, dead_after, lease, by_lock, age, time in (yield Query(d.sql(_SILENT), {"me": me, "now": now})):
        if id_ == me:
            at = int(time)
        else:
            found.append(SilentWorker(id_, beats, dead_after / SECOND, lease / SECOND, bool(by_lock), age / SECOND))
    return found, at


class Judge:
    """Judges the other workers, for one worker."""

    def __init__(self, runner: Runner, presence: WorkerPresence, refused: RefusedRows) -> None:
        self._runner = runner
        self._refused = refused
        self._d = runner.dialect
        self._presence = presence
        self._silence = Silence()
        self._tenure: Tenure | None = None

    async def reap(self) -> int:
        """Give back the messages of dead and hung workers; returns their number."""
        silent = await self._observe()
        total, errors = 0, FirstError()
        for worker in silent:
            with errors:
                if worker.silence.seconds > worker.lease:
                    silence = round(worker.silence.seconds * SECOND)
                    total += (await self._release_held(worker, silence))[0]
                if not worker.by_lock and worker.age > _FORGET_AFTER and worker.silence.seconds > _PATIENT:
                    await self._forget(worker)  # if it lives after all, its next beat inserts its row again
        for worker in await self._dead(silent):
            with errors:
                held, some_held = await self._release_held(worker, FOREVER, check_lock=True)
                own, some_own = await self._release_own(worker)
                total += held + own
                if not (some_held or some_own):
                    await self._forget(worker)
        return errors.count(total)

    async def _observe(self) -> list[SilentWorker]:
        tenure = self._presence.tenure
        if tenure is None or tenure != self._tenure:
            self._silence.restart()
        self._tenure = tenure
        if tenure is None:
            return []
        steps = partial(silent_workers, self._d, self._presence.id, self._runner.now())
        found, at = await self._runner.read(steps)
        if at is None or self._presence.tenure != tenure:
            self._silence.restart()
            return []
        beats = {worker.id: Beat(worker.beats, worker.age) for worker in found}
        observed = self._silence.observe(beats, at, monotonic())
        return [msgspec.structs.replace(worker, silence=observed[worker.id]) for worker in found]

    async def _dead(self, silent: Sequence[SilentWorker]) -> list[SilentWorker]:
        """The dead workers. Their lock was free in two checks."""
        tenure = self._tenure
        if tenure is None or tenure.lock is None:
            return []
        patient = monotonic() - tenure.since >= _PATIENT
        near = [w for w in silent if w.by_lock and w.dead_in <= _SOON and (w.silence.seen or patient)]
        free = await self._free(near)
        if not free:
            return []
        await asyncio.sleep(max(_CHECKS_APART, *(w.dead_in for w in near if w.id in free)))
        return [w for w in await self._observe() if w.id in free and w.dead_in <= 0]

    async def _free(self, workers: Sequence[SilentWorker]) -> set[int]:
        """Those of the workers whose lock is free, as far as this reaper may judge."""
        if not workers:
            return set()
        return await self._runner.read(lambda: self._free_locks([worker.id for worker in workers]))

    def _free_locks(self, workers: Sequence[int]) -> Steps[set[int]]:
        me = self._presence.id
        rows = yield Query(self._d.sql(_LOCKS), {"workers": [me, *workers]})
        held = {int(id_): bool(lock) for id_, lock in rows}
        # Our lock is gone too: the server was restarted, or this is another server.
        return {id_ for id_ in workers if not held.get(id_, True)} if held.get(me) else set()

    async def _release_held(self, worker: SilentWorker, silent: int, *, check_lock: bool = False) -> tuple[int, bool]:
        """Release the messages that its row holds, with a lease shorter than `silent` microseconds."""
        return await self._release(
            worker,
            partial(held_ids, self._d, worker.id, silent),
            lambda ids: release_held(self._d, worker.id, silent, ids, self._runner.now()),
            check_lock=check_lock,
        )

    async def _release_own(self, worker: SilentWorker) -> tuple[int, bool]:
        """Release the messages of a dead worker with separate leases."""
        return await self._release(
            worker,
            partial(own_ids, self._d, worker.id),
            lambda ids: release_own(self._d, worker.id, ids, self._runner.now()),
            check_lock=True,
        )

    async def _release(
        self,
        worker: SilentWorker,
        find: Callable[[int], Steps[list[Any]]],
        release: Callable[[Sequence[Any]], Steps[int]],
        *,
        check_lock: bool,
    ) -> tuple[int, bool]:
        """Release batch by batch; returns the number of messages, and whether some are left."""

        def steps(ids: Sequence[Any]) -> Steps[int]:
            if self._presence.tenure != self._tenure or not (yield from still_silent(self._d, worker.id, worker.beats)):
                return 0
            # A third check of the lock, in the same transaction: this call may have waited for the network since the
            # second one, and living workers that were cut off as well are back.
            if check_lock and worker.id not in (yield from self._free_locks([worker.id])):
                return 0
            return (yield from release(ids))

        return await release_all(
            self._refused,
            lambda limit: self._runner.read(partial(find, limit)),
            lambda ids: self._runner.write(partial(steps, ids)),
        )

    async def _forget(self, worker: SilentWorker) -> None:
        # Its row goes last: the worker is found again if this call is cut short, and decides about crashes.
        await self._runner.engine.discard(worker.id)
        await self._runner.write(lambda: forget_silent(self._d, worker.id, worker.beats))
