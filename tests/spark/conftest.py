"""One Spark session for the whole run: starting one takes ten seconds."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from uuid import uuid4

import pytest

import millpond.spark
from bench.spark.ground import jdbc_driver
from servers import MariaDB, Postgres, SparkCluster
from tests.spark.ponds import fill


@pytest.fixture(scope="session")
def spark(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    folder = tmp_path_factory.mktemp("spark")
    session = millpond.spark.session(
        "millpond-tests",
        "local[2]",
        {
            "spark.driver.memory": "1g",
            "spark.jars": jdbc_driver(),
            "spark.driver.extraJavaOptions": "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC",
            "spark.sql.shuffle.partitions": "2",
            "spark.sql.warehouse.dir": str(folder / "warehouse"),
            "spark.local.dir": str(folder),
            "spark.sql.streaming.numRecentProgressUpdates": "1000",
        },
    )
    yield session
    session.stop()


@pytest.fixture(scope="session", params=["postgres", "mariadb", "sqlite"])
def filled_url(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A database of each kind with messages in every state; to be read only."""
    if request.param == "sqlite":
        url = f"sqlite:///{tmp_path_factory.mktemp('filled') / 'pond.db'}"
        fill(url)
        yield url
        return
    server: Postgres | MariaDB = request.getfixturevalue(f"{request.param}_server")
    name = f"filled_{uuid4().hex[:12]}"
    url = server.create_database(name)
    fill(url)
    yield url
    server.drop_database(name)


@pytest.fixture(scope="session")
def spark_cluster() -> Iterator[SparkCluster]:
    """A master and two workers. A process has one Spark session, so that what uses this runs in one of its own."""
    with SparkCluster() as cluster:
        yield cluster
