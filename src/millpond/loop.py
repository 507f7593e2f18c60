"""An event loop that runs on while synchronous code does not wait for it."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class LoopThread(threading.Thread):
    """An event loop in a thread of its own; it never keeps a program from ending."""

    def __init__(self) -> None:
        super().__init__(name="millpond-loop", daemon=True)
        self._loop = asyncio.new_event_loop()
        self.start()

    def run(self) -> None:
        self._loop.run_forever()
        self._loop.close()

    def wait_for(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    def end(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self.join()
