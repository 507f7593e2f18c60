"""The beats of a worker come from another thread than its claims, whatever the thread of the claims does."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

from tests.triggers import execute
from tests.waiting import SOON


async def test_a_thread_beats_while_the_event_loop_that_joined_is_blocked(url: str, store: Any) -> None:
    """Its first beat opens or takes over the session, and waits for nothing in the blocked loop."""
    presence = await store.workers.join()
    presence.announce_stop()
    seen: list[Any] = []

    async def beat() -> None:
        seen.append(await presence.beat())
        seen.append(execute(url, "SELECT stopping FROM millpond_worker"))
        await presence.leave()

    thread = threading.Thread(target=asyncio.run, args=[beat()], daemon=True)
    thread.start()
    thread.join(SOON / 4)  # this blocks the event loop
    assert seen == [True, [(1,)]]
    assert execute(url, "SELECT count(*) FROM millpond_worker") == [(0,)]
