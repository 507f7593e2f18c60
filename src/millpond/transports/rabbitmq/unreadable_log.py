"""One log line a second for messages that cannot be read, however many a publisher sends."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter

log = logging.getLogger("millpond.rabbitmq")

_EVERY = 1.0
"""Seconds between two lines."""


class UnreadableLog:
    """Logs the first message at once, and the number of further ones once a second."""

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()
        self._pausing = False

    def add(self, queue: str, error: Exception) -> None:
        if self._pausing:
            self._counts[queue] += 1
            return
        log.error("a message in queue %r cannot be read; it goes to the dead letters: %s", queue, error)
        self._pause()

    def _pause(self) -> None:
        self._pausing = True
        asyncio.get_running_loop().call_later(_EVERY, self._continue)

    def _continue(self) -> None:
        self._pausing = False
        if self._counts:
            for queue, count in self._counts.items():
                log.error("messages cannot be read: %d more in queue %r; they go to the dead letters", count, queue)
            self._counts.clear()
            self._pause()
