"""Proxies with which these tests cut connections."""

from collections.abc import Iterator

import pytest

from servers import MariaDB, Postgres, Proxy


@pytest.fixture
def postgres_proxy(postgres_server: Postgres) -> Iterator[Proxy]:
    with Proxy(postgres_server.port) as proxy:
        yield proxy


@pytest.fixture
def mariadb_proxy(mariadb_server: MariaDB) -> Iterator[Proxy]:
    with Proxy(mariadb_server.port) as proxy:
        yield proxy
