"""`session()` makes a ready session, `register()` prepares an existing one; SQLite is refused on clusters."""

from __future__ import annotations

import os
import re
import shutil
import sys
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from millpond import transports
from millpond.errors import MissingDriver, Unsupported

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from millpond.spark.options import SparkShard
    from millpond.transports.url import Url

PUSH_DOWN = "spark.sql.python.filterPushdown.enabled"

_SETTINGS = {
    "spark.sql.session.timeZone": "UTC",
    "spark.sql.execution.arrow.pyspark.enabled": "true",
    # Half of the time of a large read is spent between Spark and Python on one machine.
    "spark.python.unix.domain.socket.enabled": "true",
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
    "spark.log.level": "ERROR",
    PUSH_DOWN: "true",
    # Spark's own pattern, and URLs with a password: the event log and the web pages show all other settings.
    "spark.redaction.regex": r"(?i)secret|password|token|access[.]?key|://[^/@\s]*:[^@\s]*@",
}
_IS_LOCAL = re.compile(r"local(\[.*\])?")
# A driver advertises the address of its host name, which on a laptop changes with the network.
_LOCAL = {"spark.driver.host": "127.0.0.1", "spark.driver.bindAddress": "127.0.0.1"}


def session(app: str = "millpond", master: str = "local[*]", settings: Mapping[str, str] | None = None) -> SparkSession:
    """A new session with `format("millpond")`, or the existing one.

    `settings` are Spark's and override ours: `{"spark.driver.memory": "4g"}`. The executors run this interpreter unless
    PYSPARK_PYTHON names another.
    """
    check()
    from pyspark.sql import SparkSession

    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    builder = SparkSession.builder.appName(app).master(master)
    local = _LOCAL if master.startswith("local") else {}
    for name, value in {**_SETTINGS, **local, **(settings or {})}.items():
        builder = builder.config(name, value)
    return register(builder.getOrCreate())


def check() -> None:
    """Raise `MissingDriver` if PySpark or Java is missing: at once, before Spark starts."""
    try:
        import pyspark.sql  # noqa: F401
    except ModuleNotFoundError as e:
        raise MissingDriver(f'Spark needs the package {e.name}; install it with: pip install "millpond[spark]"') from e
    if not os.environ.get("JAVA_HOME") and shutil.which("java") is None:
        raise MissingDriver("Spark needs Java 17 or later; on Debian: apt-get install openjdk-17-jre-headless")


def register(spark: SparkSession) -> SparkSession:
    """Add `format("millpond")` with filters that the database evaluates to a session; returns the session.

    Spark finds an installed package by itself, but pushes no filters down without this setting.
    """
    from millpond.spark.source import PushingSource

    spark.conf.set(PUSH_DOWN, "true")
    spark.dataSource.register(PushingSource)
    return spark


def is_local(master: str) -> bool:
    """Whether all tasks run on the driver's machine, in the driver."""
    return _IS_LOCAL.fullmatch(master) is not None


def refuse_files_on_a_cluster(shards: Iterable[SparkShard]) -> None:
    """Call this in a task, before it connects: only there Spark gives the name of its master.

    SQLite is a file of one machine. A task on a cluster would open the path on its own machine and find no file, or
    another one.
    """
    from pyspark import TaskContext

    task = TaskContext.get()
    master = task.getLocalProperty("spark.master") if task is not None else None
    for shard in shards:
        refuse_file(shard.url, master)


def refuse_file(url: Url, master: str | None) -> None:
    if transports.is_file(url.raw) and master is not None and not is_local(master):
        raise Unsupported(
            f"{url} is a file of one machine, and the tasks of {master} may run on others: use a local "
            "master, or PostgreSQL, MySQL or MariaDB"
        )
