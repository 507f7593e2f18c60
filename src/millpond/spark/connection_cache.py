"""Readers cached in a task's process for later tasks: connecting takes longer than reading a micro-batch.

Processes of tasks live as long as their executor. A reader that no task uses for some time is closed: a large cluster
would otherwise keep a connection for each of its cores.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Lock, Timer
from typing import Any

from millpond.seam.arrow import ArrowReader
from millpond.spark.options import SparkShard
from millpond.transports import is_file

IDLE = 60.0
"""Seconds after which an unused reader is closed, by default."""

_cached: dict[tuple[Any, ...], ArrowReader] = {}
_timers: dict[tuple[Any, ...], Timer] = {}
_lock = Lock()


@contextmanager
def cached_reader(shard: SparkShard, idle: float = IDLE) -> Iterator[ArrowReader]:
    """Every error, and a result that is read in part only, ends the connection."""
    # By process: a child must not use its parent's connection.
    key = (os.getpid(), shard.url.raw, shard.schema, shard.table_prefix)
    with _lock:
        reader = _cached.pop(key, None)
        if timer := _timers.pop(key, None):
            timer.cancel()
    if reader is not None and not reader.is_alive():
        reader.close()
        reader = None
    reader = reader or shard.open_reader()
    try:
        yield reader
        reader.rest()
    except BaseException:
        reader.close()
        raise
    with _lock:
        _cached[key] = reader
        if not is_file(shard.url.raw):  # a file needs no session of a server
            unused = _timers[key] = Timer(idle, lambda: _close_unused(key, unused))
            unused.daemon = True
            unused.start()


def _close_unused(key: tuple[Any, ...], timer: Timer) -> None:
    """Close the reader unless a task has taken it meanwhile."""
    with _lock:
        if _timers.get(key) is not timer:
            return
        del _timers[key]
        reader = _cached.pop(key, None)
    if reader is not None:
        reader.close()
