"""Run steps on the caller's own connection, in the caller's own transaction.

Nothing here commits, rolls back the transaction or changes a setting of the caller's session, and the driver's errors
pass unchanged. A connection that has no transaction open, and would not begin one by itself, is refused: each
statement would be committed alone, and a rollback would leave traces.

The steps have all of their effect or none, even if the caller catches an error or a cancellation and commits. One
statement has this property. Several run after a savepoint, or the transaction is aborted where any error does that.
Calls on one connection run one after the other (`borrowed/connection_lock.py`).

One coroutine serves synchronous and asynchronous drivers: on a synchronous connection it never waits, and it ends
without an event loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Sequence
from typing import Any, TypeVar

from millpond.clock import monotonic
from millpond.errors import WrongConnection, WrongDatabase
from millpond.transports.database.borrowed.connection_lock import connection_lock
from millpond.transports.database.borrowed.drivers import Borrowed, adapt, class_names, is_asynchronous
from millpond.transports.database.borrowed.identity import OwnDatabase
from millpond.transports.database.sql.dialect import Dialect
from millpond.transports.database.sql.statement import Query, Statement, Steps, drive_async

T = TypeVar("T")

_SAVEPOINT = Query(Statement("SAVEPOINT millpond_call"), {})
_ROLLBACK = Query(Statement("ROLLBACK TO SAVEPOINT millpond_call"), {})
_RELEASE = Query(Statement("RELEASE SAVEPOINT millpond_call"), {})
# PostgreSQL. Not by a savepoint: a snapshot does not list the transaction numbers of savepoints, and parts of a Spark
# read would show rows that were archived after one.
_ABORT = Query(
    Statement("DO $$ BEGIN RAISE EXCEPTION 'a call of Millpond was cancelled: roll back this transaction'; END $$"), {}
)
_UNMIGRATED = "the database of this connection lacks a table or column of Millpond; run: millpond migrate URL"
_UNDO_WITHIN = 10.0
"""Seconds for which a failed call waits until it is undone. On a connection that is cut off it may never end."""
_BUSY_PAUSE = 0.005
"""Seconds until the next try to undo, while the driver executes a statement of the caller."""


async def run(
    dialect: Dialect, connection: Any, steps: Steps[T], own: OwnDatabase, *, one_statement: bool = False
) -> T:
    """Run steps on the caller's connection, asynchronous or not. `one_statement`: at most one of them writes."""
    try:
        if not is_asynchronous(connection):
            return await _run(dialect, connection, steps, own, one_statement=one_statement)
        async with connection_lock(connection):
            return await _run(dialect, connection, steps, own, one_statement=one_statement)
    except Exception as e:
        # Django's errors have the driver's as their cause.
        if dialect.is_missing_table(e) or (e.__cause__ is not None and dialect.is_missing_table(e.__cause__)):
            e.add_note(_UNMIGRATED)
        raise


async def _run(dialect: Dialect, connection: Any, steps: Steps[T], own: OwnDatabase, *, one_statement: bool) -> T:
    borrowed = await adapt(connection)
    await _check(dialect, borrowed)
    await own.check(dialect, borrowed)
    if one_statement:
        return await drive_async(steps, borrowed.execute)
    if not dialect.error_aborts:
        await borrowed.execute(_SAVEPOINT)
    try:
        result = await drive_async(steps, borrowed.execute)
    except BaseException as e:
        undo = _undo(borrowed, [_ABORT] if dialect.error_aborts else [_ROLLBACK, _RELEASE])
        if not is_asynchronous(connection):
            await undo
        elif await _uncancelled(undo) and not isinstance(e, asyncio.CancelledError):
            raise asyncio.CancelledError from e
        raise
    if not dialect.error_aborts:
        # Not in the block above: a cancellation here comes too late and leaves all of the effect.
        await borrowed.execute(_RELEASE)
    return result


def run_sync(dialect: Dialect, connection: Any, steps: Steps[T], own: OwnDatabase, *, one_statement: bool = False) -> T:
    """Run steps on the caller's synchronous connection; needs no event loop."""
    if is_asynchronous(connection):
        raise WrongConnection(
            f"within= was given the asynchronous {class_names(connection)[0]}: use `await store.publish(...)` and "
            "`await store.settle(...)` with it, or give a synchronous connection"
        )
    return _without_waiting(run(dialect, connection, steps, own, one_statement=one_statement))


async def _undo(borrowed: Borrowed, steps: Sequence[Query]) -> None:
    """Run all steps, or those up to the first error.

    An error means that the transaction or the connection has ended, as after a deadlock, or that it is aborted now:
    there is nothing that the caller could commit. Only a driver that is busy with a statement of the caller is asked
    again.
    """
    give_up_at = monotonic() + _UNDO_WITHIN
    for step in steps:
        while (error := await _error_of(borrowed, step)) is not None:
            if not borrowed.is_busy(error) or monotonic() > give_up_at:
                return
            await asyncio.sleep(_BUSY_PAUSE)


async def _error_of(borrowed: Borrowed, step: Query) -> Exception | None:
    try:
        await borrowed.execute(step)
    except Exception as e:
        return e
    return None


async def _uncancelled(work: Coroutine[Any, Any, None]) -> bool:
    """Finish work, although the caller may be cancelled meanwhile. Returns whether it was."""
    task = asyncio.ensure_future(work)
    give_up_at = monotonic() + _UNDO_WITHIN
    cancelled = False
    while not task.done() and (rest := give_up_at - monotonic()) > 0:
        try:
            await asyncio.wait([task], timeout=rest)
        except asyncio.CancelledError:
            cancelled = True
    return cancelled


async def _check(dialect: Dialect, borrowed: Borrowed) -> None:
    if borrowed.database != dialect.name:
        raise WrongDatabase(
            f"within= was given a connection to {borrowed.database}, and the store is in {dialect.name}: "
            "give a connection to the store's own database"
        )
    if not await borrowed.begun():
        raise WrongConnection(
            "within= was given a connection in autocommit mode with no transaction open: nothing could be rolled "
            "back; begin a transaction first"
        )


def _without_waiting(coroutine: Coroutine[Any, Any, T]) -> T:
    try:
        coroutine.send(None)
    except StopIteration as stop:
        result: T = stop.value
        return result
    coroutine.close()
    raise AssertionError("a synchronous connection returned an awaitable")
