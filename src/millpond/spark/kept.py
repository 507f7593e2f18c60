"""A connection to read by, kept in a task's process for the tasks after it: making one takes longer than to read
a micro-batch."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from millpond.errors import StoreError

if TYPE_CHECKING:
    from millpond.spark.options import Shard
    from millpond.transports.database.fetch import Fetcher

_kept: dict[tuple[Any, ...], Fetcher] = {}


@contextmanager
def kept_fetcher(shard: Shard) -> Iterator[Fetcher]:
    """Whatever goes wrong, or is read in part only, ends the connection."""
    # By process: a child must not use its parent's.
    key = (os.getpid(), shard.url.raw, shard.schema, shard.table_prefix)
    fetcher = _alive(_kept.pop(key, None)) or shard.fetcher()
    try:
        yield fetcher
        fetcher.rest()
    except BaseException:
        fetcher.close()
        raise
    _kept[key] = fetcher


def close_kept() -> None:
    while _kept:
        _kept.popitem()[1].close()


def _alive(fetcher: Fetcher | None) -> Fetcher | None:
    """The server may have been restarted since the last task."""
    if fetcher is None:
        return None
    try:
        fetcher.rows("SELECT 1", {})
    except StoreError:
        fetcher.close()
        return None
    return fetcher
