"""Shared fixtures of the Spark tests."""

from __future__ import annotations

from collections.abc import Iterator
from uuid import uuid4

import pytest

from servers import MariaDB, Postgres, SparkCluster
from tests.spark.ponds import fill


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
    """A master and two workers. A process has one Spark session, so users of this run in a separate process."""
    with SparkCluster() as cluster:
        yield cluster
