"""A session that works as it is, and the one line for people who have their own."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING

from millpond.errors import MissingDriver

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

PUSH_DOWN = "spark.sql.python.filterPushdown.enabled"

_SETTINGS = {
    "spark.sql.session.timeZone": "UTC",
    "spark.sql.execution.arrow.pyspark.enabled": "true",
    # Between Spark and Python on one machine: half of the time of a large read is spent there.
    "spark.python.unix.domain.socket.enabled": "true",
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
    "spark.log.level": "ERROR",
    PUSH_DOWN: "true",
}
# A driver advertises what its host name resolves to, which on a laptop changes with the network.
_LOCAL = {"spark.driver.host": "127.0.0.1", "spark.driver.bindAddress": "127.0.0.1"}


def session(app: str = "millpond", master: str = "local[*]", settings: Mapping[str, str] | None = None) -> SparkSession:
    """A session with `format("millpond")`, or the one that there is already.

    `settings` are Spark's own and go before ours: `{"spark.driver.memory": "4g"}`. The executors run this
    interpreter, unless PYSPARK_PYTHON names another.
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
    """Say what is missing on this machine, before anybody waits for Spark to say it."""
    try:
        import pyspark.sql  # noqa: F401
    except ModuleNotFoundError as e:
        raise MissingDriver(f'Spark needs the package {e.name}; install it with: pip install "millpond[spark]"') from e
    if not os.environ.get("JAVA_HOME") and shutil.which("java") is None:
        raise MissingDriver("Spark needs Java 17 or later; on Debian: apt-get install openjdk-17-jre-headless")


def register(spark: SparkSession) -> SparkSession:
    """Make `format("millpond")` known to a session, with filters that the database answers; returns the session.

    Spark finds an installed package by itself, but pushes no filters down unless told; hence this line.
    """
    from millpond.spark.source import PushingSource

    spark.conf.set(PUSH_DOWN, "true")
    spark.dataSource.register(PushingSource)
    return spark
