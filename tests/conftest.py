"""What every test may ask for: a fresh, empty database on a real server.

Servers start when the first test needs them, once per run; in a parallel run (`-n 2`) each of the processes that
run tests has its own.
"""

import logging
import os
import random
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest

from servers import MariaDB, Postgres, RabbitMQ
from servers.spark import JAVA
from tests.shared import SharedDatabase

FAULTS, FAULTS_SEED = "faults", "MILLPOND_FAULTS_SEED"
"""What each fault test found, as a property of its report; and where their chance begins."""
# Here, so that all processes of a parallel run have the same.
os.environ[FAULTS_SEED] = os.environ.get(FAULTS_SEED) or str(random.SystemRandom().randrange(1 << 32))
SPARK = "spark"
"""What needs Java: one test after the other, since one of them keeps both processors busy."""
FIRST = (SPARK, "faults", "races", "worker")
"""In a parallel run: what takes longest, so that nobody waits for it at the end, and what mostly waits itself, while
Spark keeps the processors busy."""
# Of all drivers that tests start, and of what Spark starts to find out how to start Java.
os.environ["SPARK_SUBMIT_OPTS"] = os.environ["SPARK_LAUNCHER_OPTS"] = JAVA
SPARKS_LOGGERS = ("DataFrameQueryContextLogger", "SQLQueryContextLogger")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--long", action="store_true", help="also run the tests that take minutes")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: FIRST.index(kind) if (kind := _kind(item.nodeid)) in FIRST else len(FIRST))
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
            return SPARK if _kind(nodeid) == SPARK else nodeid.partition("::")[0]

    return ByFile(config, log)


def _kind(nodeid: str) -> str:
    """The folder, or that it is about Spark: `faults` of `tests/faults/test_poison.py::test_it`."""
    file = nodeid.partition("::")[0]
    return SPARK if SPARK in file else file.split("/")[1]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call() -> Generator[None, Any, Any]:
    """Keep Spark's log format off other tests. Once Spark has told an error in SQL it has a logger that passes nothing
    on; pytest adds its own handler to each such logger, and Spark's gives that handler its format, for good."""
    try:
        return (yield)
    finally:
        for name in SPARKS_LOGGERS:
            logger = logging.root.manager.loggerDict.get(name)
            if isinstance(logger, logging.Logger):
                logger.propagate = True


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
def mortal_postgres() -> Iterator[Postgres]:
    with Postgres() as server:
        yield server


@pytest.fixture(scope="session")
def mortal_mariadb() -> Iterator[MariaDB]:
    with MariaDB() as server:
        yield server


@pytest.fixture
def own_postgres(mortal_postgres: Postgres) -> Postgres:
    """To be killed. A test that failed may have left it so."""
    return mortal_postgres.start()


@pytest.fixture
def own_mariadb(mortal_mariadb: MariaDB) -> MariaDB:
    return mortal_mariadb.start()


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


@pytest.fixture(scope="session")
def spark(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """One session for the whole run: starting one takes ten seconds."""
    import millpond.spark
    from bench.spark.ground import jdbc_driver

    folder = tmp_path_factory.mktemp("spark")
    session = millpond.spark.session(
        "millpond-tests",
        "local[2]",
        {
            "spark.driver.memory": "1g",
            "spark.jars": jdbc_driver(),
            "spark.sql.shuffle.partitions": "2",
            "spark.sql.warehouse.dir": str(folder / "warehouse"),
            "spark.local.dir": str(folder),
            "spark.sql.streaming.numRecentProgressUpdates": "1000",
        },
    )
    yield session
    session.stop()


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
