"""`millpond run --on spark`: the session, what is shipped to its executors, and the crew of its tasks."""

from __future__ import annotations

import contextlib
import logging
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from millpond.cli.spark import spark_session
from millpond.pond import Millpond

if TYPE_CHECKING:
    from millpond.cli.worker import Options
    from millpond.spark.tasks import Tasks


class Cluster(msgspec.Struct, frozen=True):
    """Where to run, and with what."""

    master: str = "local[*]"
    tasks: int | None = None
    py_files: list[str] = []
    archives: list[str] = []
    conf: list[str] = []
    driver_port: int = 0


def find_modules_in(py_files: Sequence[str]) -> None:
    """The driver imports the pond too, before there is a session that would see to it."""
    for file in py_files:
        folder = file if not file.endswith(".py") else str(Path(file).parent.resolve())
        if folder not in sys.path:
            sys.path.insert(0, folder)


@contextlib.contextmanager
def session(pond: Millpond, target: str, cluster: Cluster) -> Iterator[Any]:
    from millpond.spark.local import refuse_file

    refuse_file(pond.url, cluster.master)  # before a session is waited for
    logging.getLogger("py4j").setLevel(logging.WARNING)  # it tells of each connection that it closes
    with spark_session(f"millpond run {target}", cluster.master, cluster.conf) as spark:
        for file in cluster.py_files:
            spark.sparkContext.addPyFile(file)
        for archive in cluster.archives:
            spark.sparkContext.addArchive(archive)
        yield spark


def crew(pond: Millpond, spark: Any, cluster: Cluster, options: Options) -> Tasks:
    from millpond.spark.handlers import crew_for

    return crew_for(
        pond,
        spark,
        at=options.target,
        tasks=cluster.tasks,
        queues=options.queues,
        grace=options.grace,
        until_idle=options.until_idle,
        port=cluster.driver_port,
        logging_options=["--log-format", options.log_format, "--log-level", options.log_level],
    )
