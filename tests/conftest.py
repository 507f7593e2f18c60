"""What every test may ask for: a fresh, empty database on a real server.

Servers start when the first test needs them, once per run.
"""

from collections.abc import Iterator
from pathlib import Path
from uuid import uuid4

import pytest

from servers import MariaDB, Postgres


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--long", action="store_true", help="also run the tests that take minutes")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--long"):
        return
    long = [item for item in items if item.get_closest_marker("long")]
    config.hook.pytest_deselected(items=long)
    items[:] = [item for item in items if item not in long]


@pytest.fixture(scope="session")
def postgres_server() -> Iterator[Postgres]:
    with Postgres() as server:
        yield server


@pytest.fixture(scope="session")
def mariadb_server() -> Iterator[MariaDB]:
    with MariaDB() as server:
        yield server


@pytest.fixture
def postgres_url(postgres_server: Postgres) -> Iterator[str]:
    name = fresh_name()
    yield postgres_server.create_database(name)
    postgres_server.drop_database(name)


@pytest.fixture
def mariadb_url(mariadb_server: MariaDB) -> Iterator[str]:
    name = fresh_name()
    yield mariadb_server.create_database(name)
    mariadb_server.drop_database(name)


@pytest.fixture
def sqlite_url(tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path / 'pond.db'}"


def fresh_name() -> str:
    return f"test_{uuid4().hex[:12]}"
