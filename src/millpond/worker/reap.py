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
            await store.reap()
        except Closed:
            return
        except MillpondError as e:
            log.warning("cannot reap now: %s", e)
        except Exception:  # whatever it is, the next round may do better, and leases do not wait
            log.exception("cannot reap now")
        await asyncio.sleep(EVERY)
