"""The purge loop: now and then deletes what no queue's retention keeps, and makes the archive's next days ready.

However many workers there are, one deletes at a time; the others find little left to do.
"""

from __future__ import annotations

import asyncio
import logging
import random

from millpond.errors import Closed, MillpondError
from millpond.transport import Store

log = logging.getLogger("millpond.worker")

FIRST, EVERY = 60.0, 3600.0
"""Seconds until the first purge, and between two: each up to half as much shorter or longer, so that workers that
started together do not purge together. The first comes soon, for workers that never live for an hour."""


async def purge(store: Store) -> None:
    """Until cancelled."""
    pause = FIRST
    while True:
        await asyncio.sleep(pause * random.uniform(0.5, 1.5))
        pause = EVERY
        try:
            count = await store.purge()
        except Closed:
            return
        except MillpondError as e:
            log.warning("cannot purge now: %s", e)
        except Exception:  # whatever it is, an archive that grows must not stop the worker
            log.exception("cannot purge now")
        else:
            if count:
                log.info("%d messages were purged from the archive", count)
