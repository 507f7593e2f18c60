"""The reap loop: gives back what dead or hung workers hold."""

from __future__ import annotations

import asyncio
import logging

from millpond.errors import Closed, MillpondError
from millpond.transport import Store

log = logging.getLogger("millpond.worker")

EVERY = 1.0


async def reap(store: Store) -> None:
    """Until cancelled."""
    while True:
        try:
            count = await store.reap()
            if count:
                log.info("gave back %d messages of dead or hung workers", count)
        except Closed:
            return
        except MillpondError as e:
            log.warning("cannot reap now: %s", e)
        await asyncio.sleep(EVERY)
