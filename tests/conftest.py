"""What every test may ask for: a fresh, empty database on a real server.

Servers start when the first test needs them, once per run; in a parallel run (`-n 2`) each of the processes that
run tests has its own.
"""

import os
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest

from servers import MariaDB, Postgres, RabbitMQ
from tests.shared import SharedDatabase

FAULTS, FAULTS_SEED = "faults", "MILLPOND_FAULTS_SEED"
"""What each fault test found, as a property of its report; and where their chance begins."""
# Here, so that all processes of a parallel run have the same.
os.environ[FAULTS_SEED] = os.environ.get(FAULTS_SEED) or str(random.SystemRandom().randrange(1 << 32))
SPARK = "spark"
"""The folder whose tests share one Spark session."""
SLOWEST_FIRST = {SPARK: 0, "faults": 1}


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--long", action="store_true", help="also run the tests that take minutes")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    # What takes longest begins first, so that a parallel run does not wait for it at the end.
    items.sort(key=lambda item: SLOWEST_FIRST.get(_folder(item.nodeid), len(SLOWEST_FIRST)))
    if config.getoption("--long"):
        return
    long = [item for item in items if item.get_closest_marker("long")]
    config.hook.pytest_deselected(items=long)
    items[:] = [item for item in items if item not in long]


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """The tests of a file stay together, since they share what was costly to prepare; so do all that use Spark."""
    from xdist.scheduler import LoadScopeScheduling

    class ByFile(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return SPARK if _folder(nodeid) == SPARK else nodeid.partition("::")[0]

    return ByFile(config, log)


def _folder(nodeid: str) -> str:
    """`faults` of `tests/faults/test_poison.py::test_it`."""
    return nodeid.split("/")[1]


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    ends = [end for ends in terminalreporter.stats.values() for end in ends if getattr(end, "when", None) == "call"]
    lines = [line for end in ends for name, line in end.user_properties if name == FAULTS]
    if lines:
        terminalreporter.section(f"faults ({FAULTS_SEED}={os.environ[FAULTS_SEED]})")
        for line in lines:
            terminalreporter.write_line(line)


@pytest.fixture(scope="session")
def postgres_server() -> Iterator[Postgres]:
    with Postgres() as server:
        yield server


@pytest.fixture(scope="session")
def mariadb_server() -> Iterator[MariaDB]:
    with MariaDB() as server:
        yield server


@pytest.fixture(scope="session")
def own_postgres() -> Iterator[Postgres]:
    """To be killed."""
    with Postgres() as server:
        yield server


@pytest.fixture(scope="session")
def own_mariadb() -> Iterator[MariaDB]:
    """To be killed."""
    with MariaDB() as server:
        yield server


@pytest.fixture(scope="session")
def shared_postgres(postgres_server: Postgres) -> Iterator[SharedDatabase]:
    with SharedDatabase(postgres_server) as database:
        yield database


@pytest.fixture(scope="session")
def shared_mariadb(mariadb_server: MariaDB) -> Iterator[SharedDatabase]:
    with SharedDatabase(mariadb_server) as database:
        yield database


@pytest.fixture(scope="session")
def rabbitmq_server() -> Iterator[RabbitMQ]:
    with RabbitMQ() as server:
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
def rabbitmq_url(rabbitmq_server: RabbitMQ) -> Iterator[str]:
    """A virtual host of its own."""
    name = fresh_name()
    yield rabbitmq_server.create_vhost(name)
    rabbitmq_server.drop_vhost(name)


@pytest.fixture
def sqlite_url(tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path / 'pond.db'}"


def fresh_name() -> str:
    return f"test_{uuid4().hex[:12]}"
