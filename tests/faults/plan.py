"""What a test tells the processes that it starts: one value, in one environment variable."""

from __future__ import annotations

import os
from typing import Any

import msgspec

VARIABLE = "MILLPOND_FAULTS"


class Aim(msgspec.Struct, frozen=True):
    """Where a process kills itself: the `nth` time that it comes to the point."""

    point: str
    """claim, settle, handler, effect, commit or committed; row, published or committing in publishers."""
    when: str = "before"
    """before, amid or after: `amid` is a moment by chance while the call is under way."""
    nth: int = 1


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """One process: a worker, or a publisher."""

    url: str
    folder: str
    """Where the process writes what only it knows, and finds the word to go on."""
    queues: dict[str, dict[str, Any]] = {}
    """Queue, which is also the name of its handler in app.py, and the subscriber's options."""
    effects_url: str | None = None
    """Where effects are written, if not by way of `url`."""
    connect: dict[str, Any] = {}
    hold: bool = False
    """Handlers wait for a word, between their first effect and their end."""
    aim: Aim | None = None
    driver: str = ""
    """For publishers: whose connection they publish within."""
    producer: str = ""

    def environment(self) -> dict[str, str]:
        return os.environ | {VARIABLE: msgspec.json.encode(self).decode()}

    @classmethod
    def of_this_process(cls) -> Plan:
        return msgspec.json.decode(os.environ[VARIABLE], type=cls)
