"""The plan that a test passes to the processes it starts: one value in one environment variable."""

from __future__ import annotations

import os
from typing import Any

import msgspec

VARIABLE = "MILLPOND_FAULTS"


class Aim(msgspec.Struct, frozen=True):
    """Where a process kills itself: the `nth` time that it reaches the point."""

    point: str
    """claim, settle, handler, effect, commit or committed; row, published or committing in publishers."""
    when: str = "before"
    """before, amid or after: `amid` is a random time during the call."""
    nth: int = 1


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """One process: a worker, or a publisher."""

    url: str
    folder: str
    """The folder of the process's own notes, and of the files that let it continue."""
    queues: dict[str, dict[str, Any]] = {}
    """Queue, and the subscriber's options. Its name up to a hyphen is that of its handler in app.py."""
    beside: dict[str, list[str]] = {}
    """Handler, and the other queues of its subscriber."""
    effects_url: str | None = None
    """Where effects are written, if not by way of `url`."""
    connect: dict[str, Any] = {}
    clock: str | None = None
    """A file with the number of hours by which the database's clock is wrong."""
    hold: bool = False
    """Handlers wait for a file between their first effect and their end."""
    aim: Aim | None = None
    driver: str = ""
    """For publishers: the driver of the connection that they publish within."""
    producer: str = ""

    def environment(self) -> dict[str, str]:
        return os.environ | {VARIABLE: msgspec.json.encode(self).decode()}

    @classmethod
    def of_this_process(cls) -> Plan:
        return msgspec.json.decode(os.environ[VARIABLE], type=cls)
