"""The reap loop and the purge loop. A failure is logged and never stops the worker; the end of a loop does."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Awaitable, Callable, Collection, Mapping

from millpond.errors import Closed, MillpondError
from millpond.message import Receipt
from millpond.seam.operations import Operations
from millpond.seam.periodic import PeriodicMessages
from millpond.seam.workers import Workers

log = logging.getLogger("millpond.worker")

REAP_EVERY = 1.0
CANCEL_EVERY = 1.0
READ_EVERY = 5.0
"""Longest time between two reads of the schedules."""
_AFTER_ERROR = 1.0
"""Seconds until due messages are published again after an error."""
FIRST_PURGE, PURGE_EVERY = 60.0, 3600.0
"""Seconds until the first purge and between two. Each varies by up to a half, because workers that started together
must not purge together. The first comes soon, for workers that live for less than an hour."""


async def reap_loop(workers: Workers, reaped: asyncio.Event) -> None:
    """Give back claims of dead or hung workers every second, until cancelled. `reaped` is set after the first time."""
    while True:
        count = await _try("reap", workers.reap)
        reaped.set()
        if count is None:
            return
        await asyncio.sleep(REAP_EVERY)


async def cancel_loop(workers: Workers, cancel: Callable[[Mapping[Receipt, str]], None]) -> None:
    """Pass on the requests of operators to cancel running messages, every second, until cancelled."""

    async def check() -> int:
        if requests := await workers.cancel_requests():
            cancel(requests)
        return 0

    while True:
        await asyncio.sleep(CANCEL_EVERY)
        if await _try("cancel", check) is None:
            return


async def periodic_loop(periodic: PeriodicMessages) -> None:
    """Publish periodic messages on time, until cancelled. Changes by an operator are found within seconds."""

    wait: float | None = None

    async def publish() -> int:
        nonlocal wait
        wait = _AFTER_ERROR
        wait = await periodic.publish_due()
        return 0

    while True:
        if await _try("periodic", publish) is None:
            return
        await asyncio.sleep(READ_EVERY if wait is None else min(max(wait, 0.01), READ_EVERY))


async def purge_loop(operations: Operations) -> None:
    """Delete archived messages beyond their retention every hour, until cancelled.

    This also prepares the archive's next day partitions. With many workers one deletes at a time; the others find
    little to do.
    """
    pause = FIRST_PURGE
    while True:
        await asyncio.sleep(pause * random.uniform(0.5, 1.5))
        pause = PURGE_EVERY
        count = await _try("purge", operations.purge)
        if count is None:
            return
        if count:
            log.info("purged: %d messages of the archive", count)


async def raise_first_error(chores: Collection[asyncio.Task[None]]) -> None:
    """Wait until a loop ends by an error, and raise it. A loop may also end because it has nothing to do."""
    waiting = set(chores)
    while waiting:
        done, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        for chore in done:
            chore.result()
    await asyncio.Event().wait()


async def _try(name: str, chore: Callable[[], Awaitable[int]]) -> int | None:
    """The chore's count, 0 after an error, None if the store is closed."""
    try:
        return await chore()
    except Closed:
        return None
    except MillpondError as e:
        log.warning("%s failed, tried again later: %s", name, e)
    except Exception:  # any other error is logged too: the next round may succeed, and leases do not wait
        log.exception("%s failed, tried again later", name)
    return 0
