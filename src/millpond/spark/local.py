"""SQLite is a file of one machine: where tasks may run on others, it is refused."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import TYPE_CHECKING

from millpond.errors import Unsupported

if TYPE_CHECKING:
    from millpond.spark.options import Shard
    from millpond.transports.url import Url

_LOCAL = re.compile(r"local(\[.*\])?")


def is_local(master: str) -> bool:
    """Whether all tasks run on the driver's machine, below the driver."""
    return _LOCAL.fullmatch(master) is not None


def refuse_files_on_a_cluster(shards: Iterable[Shard]) -> None:
    """To be called in a task, before it connects: only there Spark says what its master is.

    A task on a cluster would look for the file on its own machine, and find none or another.
    """
    from pyspark import TaskContext

    task = TaskContext.get()
    master = task.getLocalProperty("spark.master") if task is not None else None
    for shard in shards:
        refuse_file(shard.url, master)


def refuse_file(url: Url, master: str | None) -> None:
    if url.scheme == "sqlite" and master is not None and not is_local(master):
        raise Unsupported(
            f"{url} is a file of one machine, and the tasks of {master} may run on others: use a local "
            "master, or PostgreSQL, MySQL or MariaDB"
        )
