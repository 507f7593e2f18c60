"""Servers of our own, since the tests here cut, starve and kill them."""

from collections.abc import Iterator

import pytest

from servers import MariaDB, Postgres, Proxy


@pytest.fixture(scope="session")
def own_postgres() -> Iterator[Postgres]:
    with Postgres() as server:
        yield server


@pytest.fixture(scope="session")
def own_mariadb() -> Iterator[MariaDB]:
    with MariaDB() as server:
        yield server


@pytest.fixture
def postgres_proxy(postgres_server: Postgres) -> Iterator[Proxy]:
    with Proxy(postgres_server.port) as proxy:
        yield proxy


@pytest.fixture
def mariadb_proxy(mariadb_server: MariaDB) -> Iterator[Proxy]:
    with Proxy(mariadb_server.port) as proxy:
        yield proxy
