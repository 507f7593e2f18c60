"""Fixtures for all tests: a fresh, empty database on a real server. Marks; the order of a run.

A server starts when the first test needs it, once per run: all processes of a parallel run share it. A test that
kills a server asks for `own_postgres` or `own_mariadb`, which belong to its process.
"""

import contextlib
import functools
import gc
import logging
import os
import random
import re
import sys
import traceback
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest

from servers import MariaDB, Postgres, RabbitMQ, Server
from servers.spark import JAVA
from tests import schedule
from tests.server_pool import ServerPool, ask
from tests.shared import SharedDatabase

FAULTS, FAULTS_SEED = "faults", "MILLPOND_FAULTS_SEED"
"""The property of a report that holds the results of a fault test; the variable with the seed of their randomness."""
# Set here, because all processes of a parallel run must have the same seed.
os.environ[FAULTS_SEED] = os.environ.get(FAULTS_SEED) or str(random.SystemRandom().randrange(1 << 32))
# For all drivers that tests start, and for the program with which Spark finds out how to start Java.
os.environ["SPARK_SUBMIT_OPTS"] = os.environ["SPARK_LAUNCHER_OPTS"] = JAVA
os.environ["MILLPOND_PYTHON"] = sys.executable
os.environ["PYSPARK_PYTHON"] = str(Path(__file__).parent / "spark" / "python")
gc.disable()  # until all tests are collected
SPARKS_LOGGERS = ("DataFrameQueryContextLogger", "SQLQueryContextLogger")

SLOW_TIMEOUT = 600
"""Seconds for a slow test, and for one with Java: a call that is cut off spoils the session. Others have `timeout` in
pyproject.toml: a test that hangs must not cost the whole run."""
POOL = pytest.StashKey[ServerPool]()
MARKS = {
    "server": re.compile(r"(\w+_)?(postgres|postgresql|mariadb|rabbitmq)([_ ].+)?"),
    "java": re.compile(r"spark(_cluster)?"),
}
"""A test with a fixture or a parameter of such a name gets the mark. Other tests that need a server or Java are
marked by hand; `make check` fails if one is not."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--long", action="store_true", help="also run the tests that take minutes")
    parser.addoption("--record-durations", action="store_true", help=f"refresh tests/{schedule.RECORD.name}")


def pytest_configure(config: pytest.Config) -> None:
    if not hasattr(config, "workerinput"):
        config.stash[POOL] = ServerPool()
        config.pluginmanager.register(FailuresAtOnce(config))
        if config.getoption("--record-durations"):
            config.pluginmanager.register(schedule.Recorder())


def pytest_unconfigure(config: pytest.Config) -> None:
    if POOL in config.stash:
        config.stash[POOL].close()


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    node.workerinput["servers"] = node.config.stash[POOL].listen()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    return schedule.scheduler(config, log)


@pytest.hookimpl(tryfirst=True)  # before `-m` selects
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        names = _names(item)
        for mark, pattern in MARKS.items():
            if any(map(pattern.fullmatch, names)):
                item.add_marker(mark)
        if item.get_closest_marker("server"):
            for mark in ("slow", "long"):
                if item.get_closest_marker(f"{mark}_on_servers"):
                    item.add_marker(mark)
        patient = item.get_closest_marker("slow") or item.get_closest_marker("java")
        if patient and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(SLOW_TIMEOUT))
    if not config.getoption("--long"):
        long = [item for item in items if item.get_closest_marker("long")]
        config.hook.pytest_deselected(items=long)
        items[:] = [item for item in items if item not in long]
    schedule.longest_first(items)


def pytest_collection_finish() -> None:
    """Modules and tests live until the end: without them each garbage collection takes a fraction of the time."""
    if driver := sys.modules.get("asyncpg.connection"):
        _name_the_test_of_each_connection(driver.Connection)
    gc.collect()
    gc.freeze()
    gc.enable()


def _name_the_test_of_each_connection(connection: Any) -> None:
    """The warning about a connection that was never closed appears in a later test: it names the test that made it."""
    create = connection.__init__

    @functools.wraps(create)
    def create_with_origin(self: Any, *args: Any, **kwargs: Any) -> None:
        create(self, *args, **kwargs)
        frames = "".join(traceback.format_stack(sys._getframe(1), limit=12))
        self._source_traceback = f"{os.environ.get('PYTEST_CURRENT_TEST')}\n{frames}"

    connection.__init__ = create_with_origin


def _names(item: pytest.Item) -> list[str]:
    """Fixtures and parameters of a test, including names inside a tuple."""
    given = item.callspec.params.values() if hasattr(item, "callspec") else ()
    flat = [name for value in given for name in (value if isinstance(value, tuple) else (value,))]
    return [*getattr(item, "fixturenames", ()), *(name for name in flat if isinstance(name, str))]


@pytest.fixture(autouse=True)
def unchanged_logging() -> Iterator[None]:
    """Undo `cli.logs.configure` of a test: its handlers would write into the output of later tests."""
    root, own = logging.getLogger(), logging.getLogger("millpond")
    before = root.handlers[:], root.level, own.level
    yield
    root.handlers[:], root.level, own.level = before[0], before[1], before[2]
    logging.captureWarnings(False)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call() -> Generator[None, Any, Any]:
    """Keep Spark's log format off other tests. After an error in SQL Spark has a logger that does not propagate.
    pytest adds its own handler to such a logger, and Spark permanently sets the format of that handler."""
    try:
        return (yield)
    finally:
        for name in SPARKS_LOGGERS:
            logger = logging.root.manager.loggerDict.get(name)
            if isinstance(logger, logging.Logger):
                logger.propagate = True


class FailuresAtOnce:
    """Prints a failure when it happens: a run that is ended from outside shows why."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        terminal = self._config.pluginmanager.get_plugin("terminalreporter")
        if report.failed and terminal is not None:
            terminal.write_line("")
            terminal.write_sep("-", f"{report.nodeid} ({report.when}, {report.duration:.1f} s)")
            terminal.write_line(report.longreprtext)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    ends = [end for ends in terminalreporter.stats.values() for end in ends if getattr(end, "when", None) == "call"]
    lines = [line for end in ends for name, line in end.user_properties if name == FAULTS]
    if lines:
        terminalreporter.section(f"faults ({FAULTS_SEED}={os.environ[FAULTS_SEED]})")
        for line in lines:
            terminalreporter.write_line(line)


def _of_the_run(config: pytest.Config, kind: type[Server]) -> Server:
    if hasattr(config, "workerinput"):
        return ask(config.workerinput["servers"], kind)
    return config.stash[POOL].get(kind)


@pytest.fixture(scope="session")
def postgres_server(pytestconfig: pytest.Config) -> Server:
    return _of_the_run(pytestconfig, Postgres)


@pytest.fixture(scope="session")
def mariadb_server(pytestconfig: pytest.Config) -> Server:
    return _of_the_run(pytestconfig, MariaDB)


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
    """A server that tests may kill. It is started again if a failed test left it dead."""
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
def three_postgres(postgres_server: Postgres) -> Iterator[list[SharedDatabase]]:
    with contextlib.ExitStack() as stack:
        yield [stack.enter_context(SharedDatabase(postgres_server)) for _ in range(3)]


@pytest.fixture(scope="session")
def three_mariadb(mariadb_server: MariaDB) -> Iterator[list[SharedDatabase]]:
    with contextlib.ExitStack() as stack:
        yield [stack.enter_context(SharedDatabase(mariadb_server)) for _ in range(3)]


@pytest.fixture(scope="session")
def rabbitmq_server(pytestconfig: pytest.Config) -> Server:
    return _of_the_run(pytestconfig, RabbitMQ)


@pytest.fixture(scope="session")
def spark(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """One session for each process: its start takes ten seconds."""
    import millpond.spark
    from bench.spark.setup import jdbc_driver

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
            "spark.python.daemon.module": "tests.spark.daemon",
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
    """A new virtual host."""
    name = fresh_name()
    yield rabbitmq_server.create_vhost(name)
    rabbitmq_server.drop_vhost(name)


@pytest.fixture
def sqlite_url(tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path / 'pond.db'}"


def fresh_name() -> str:
    return f"test_{uuid4().hex[:12]}"
