"""`millpond run --on spark`: the session, the files shipped to executors, and the supervisor of the tasks."""

from __future__ import annotations

import contextlib
import logging
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from millpond.cli.spark_session import spark_session
from millpond.pond import Millpond

if TYPE_CHECKING:
    from millpond.cli.run_options import RunOptions
    from millpond.spark.handlers.driver import TaskSupervisor


class Cluster(msgspec.Struct, frozen=True):
    """The Spark cluster, and the files and settings for it."""

    master: str = "local[*]"
    tasks: int | None = None
    py_files: list[str] = []
    archives: list[str] = []
    conf: list[str] = []
    driver_port: int = 0


def find_modules_in(py_files: Sequence[str]) -> None:
    """Make shipped modules importable here: the driver imports the pond before there is a session."""
    for file in py_files:
        folder = file if not file.endswith(".py") else str(Path(file).parent.resolve())
        if folder not in sys.path:
            sys.path.insert(0, folder)


@contextlib.contextmanager
def session(pond: Millpond, target: str, cluster: Cluster) -> Iterator[Any]:
    from millpond.spark.sessions import refuse_file

    refuse_file(pond.url, cluster.master)  # fail before the slow start of a session
    logging.getLogger("py4j").setLevel(logging.WARNING)  # it logs every connection that it closes
    with spark_session(f"millpond run {target}", cluster.master, cluster.conf) as spark:
        for file in cluster.py_files:
            spark.sparkContext.addPyFile(file)
        for archive in cluster.archives:
            spark.sparkContext.addArchive(archive)
        yield spark


def supervisor(pond: Millpond, spark: Any, cluster: Cluster, options: RunOptions) -> TaskSupervisor:
    from millpond.spark.handlers.run import supervisor_for

    return supervisor_for(
        pond,
        spark,
        at=options.target,
        tasks=cluster.tasks,
        queues=options.queues,
        grace=options.grace,
        until_idle=options.until_idle,
        port=cluster.driver_port,
        worker_options=options.worker_options,
    )
