"""Doubts about workers, kept in their rows: for reapers that live too briefly to observe the silence of a worker.

Such reapers are programs without a worker, and workers that end at once because nothing is due. If only they are
left, they give back the messages of dead workers. The first one that finds a worker silent for ten seconds
records its doubt. After a lease another one confirms it, and after ten seconds more the messages are given back. The
next beat of the worker removes all this.

Without the confirmation two outages would do: a reaper may find the database before a living worker does, once after
each of them. The same may happen after a third one: therefore the last reaper waits for a beat before it gives back.
A claim that has messages does not wait, because their leases run: a later reap of its program gives back.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

from millpond.clock import SECOND, monotonic
from millpond.transports.database.messages.reap import release_all
from millpond.transports.database.messages.refused_rows import RefusedRows
from millpond.transports.database.runner import Runner
from millpond.transports.database.sql.dialect import Dialect
from millpond.transports.database.sql.statement import Query, Steps
from millpond.transports.database.workers.first_error import FirstError
from millpond.transports.database.workers.release import forget_silent, held_ids, release_held, still_silent

_PATIENT_US = 10 * SECOND
"""Silence that raises a doubt, and time between its confirmation and the release."""
_LAST_WAIT = 1.5
"""Seconds for which the release waits for a beat. A living worker that finds the database again beats at once."""
_FORGET_US = 3600 * SECOND
"""Time of doubt after which a worker that holds no message is forgotten."""

# A beat in the future: the clock was set back.
_SILENT = f"""
SELECT w.id, w.beats, w.lease, w.doubted_at, {{now}} FROM {{worker}} w
WHERE w.id <> :me AND (w.beat_at < {{now}} - {_PATIENT_US} OR w.beat_at > {{now}})
"""
_DOUBT = "UPDATE {worker} SET doubted_at = {now} WHERE id = :worker AND beats = :beats"
_CONFIRM = "UPDATE {worker} SET doubted_at = -{now} WHERE id = :worker AND beats = :beats AND doubted_at = :doubted_at"


class Doubted(NamedTuple):
    """A silent worker. Times are microseconds."""

    id: int
    beats: int
    lease: int
    """The shortest lease of the claims that its row holds. 0: it has not beaten since its first claim."""
    doubted_at: int | None
    """Time of the doubt. Negative: that of its confirmation."""
    at: int
    """The database's time."""

    @property
    def age(self) -> int | None:
        """Time since the doubt or its confirmation. None: there is none, or the clock was set back since."""
        age = None if self.doubted_at is None else self.at - abs(self.doubted_at)
        return None if age is None or age < 0 else age

    @property
    def is_confirmed(self) -> bool:
        return self.doubted_at is not None and self.doubted_at < 0


Left = dict[tuple[int, int], float]
"""Workers and their beats, whose messages are left to a later reap, and the monotonic time at which they were found."""


async def reap_doubted(runner: Runner, refused: RefusedRows, me: int, left: Left, *, may_wait: bool) -> int:
    """Record and confirm doubts, and give back messages of workers whose doubt was confirmed; returns their number.

    `left`: kept by the caller between its reaps.
    """
    d, now = runner.dialect, runner.now()
    total = 0
    errors = FirstError()
    holders: list[tuple[Doubted, int]] = []
    """Workers that hold messages to be released, and the least time of their silence."""
    for worker in await runner.read(partial(_silent, d, me, now)):
        with errors:
            if worker.age is None:
                await runner.write(partial(_write, d, _DOUBT, worker, now))
            elif not worker.is_confirmed:
                if worker.age > max(worker.lease, _PATIENT_US):
                    await runner.write(partial(_write, d, _CONFIRM, worker, now))
            elif worker.age >= _PATIENT_US:
                doubted = worker.lease + worker.age
                if await runner.read(partial(held_ids, d, worker.id, doubted, 1)):
                    holders.append((worker, doubted))
                elif doubted > _FORGET_US:
                    await runner.engine.discard(worker.id)
                    await runner.write(partial(forget_silent, d, worker.id, worker.beats))
    earlier = dict(left)
    left.clear()
    if holders and may_wait:
        await asyncio.sleep(_LAST_WAIT)
    for worker, doubted in holders:
        found_at = earlier.get((worker.id, worker.beats), monotonic())
        if not may_wait and monotonic() - found_at < _LAST_WAIT:
            left[worker.id, worker.beats] = found_at
            continue
        with errors:
            total += await _release_held(runner, refused, worker.id, worker.beats, doubted)
    return errors.count(total)


async def _release_held(runner: Runner, refused: RefusedRows, worker: int, beats: int, doubted: int) -> int:
    d, now = runner.dialect, runner.now()

    async def find(limit: int) -> list[Any]:
        return await runner.read(partial(held_ids, d, worker, doubted, limit))

    async def release(ids: Sequence[Any]) -> int:
        return await runner.write(partial(_release, d, worker, beats, doubted, ids, now))

    return (await release_all(refused, find, release))[0]


def _silent(d: Dialect, me: int, now: int | None) -> Steps[list[Doubted]]:
    rows = yield Query(d.sql(_SILENT), {"me": me, "now": now})
    return [Doubted(id_, beats, lease, doubted_at, int(at)) for id_, beats, lease, doubted_at, at in rows]


def _write(d: Dialect, text: str, worker: Doubted, now: int | None) -> Steps[None]:
    yield Query(d.sql(text), {"worker": worker.id, "beats": worker.beats, "doubted_at": worker.doubted_at, "now": now})


def _release(d: Dialect, worker: int, beats: int, doubted: int, ids: Sequence[Any], now: int | None) -> Steps[int]:
    if not (yield from still_silent(d, worker, beats)):
        return 0
    return (yield from release_held(d, worker, doubted, ids, now))
