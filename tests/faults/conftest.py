"""Each scenario runs on several databases: the short forms at once, since most of their time is waiting, the
long ones (`--long`) one after the other, so that each has the machine to itself."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable
from pathlib import Path
from uuid import uuid4

import pytest

from servers import MariaDB, Postgres
from tests.conftest import FAULTS
from tests.faults.ground import Ground, ground
from tests.faults.report import LINES

Scenario = Callable[[Ground], Awaitable[None]]
Everywhere = Callable[[Scenario], Awaitable[None]]

ONLY = "MILLPOND_FAULTS_ON"
"""Names the databases to run on, if not on all."""
SHORT_TIMEOUT, LONG_TIMEOUT = 600, 7200
HERE = Path(__file__).parent


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "databases(*names, own=False): where a scenario runs; own: on servers to kill")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "where" in metafunc.fixturenames:
        marker = metafunc.definition.get_closest_marker("databases")
        assert marker is not None, "say on which databases"
        long = metafunc.config.getoption("--long")
        names = [name for name in marker.args if name in os.environ.get(ONLY, name)]
        wheres = [(name,) for name in names] if long else [tuple(names)]
        metafunc.parametrize("where", wheres, ids=["+".join(names) for names in wheres])


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    seconds = LONG_TIMEOUT if config.getoption("--long") else SHORT_TIMEOUT
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.timeout(seconds))


@pytest.fixture
def long(request: pytest.FixtureRequest) -> bool:
    """Whether sizes are those of the long form."""
    return bool(request.config.getoption("--long"))


@pytest.fixture
def everywhere(request: pytest.FixtureRequest, where: tuple[str, ...], tmp_path: Path) -> Everywhere:
    """Runs a scenario on each of the test's databases; all must hold."""
    marker = request.node.get_closest_marker("databases")
    servers: dict[str, Postgres | MariaDB] = {}
    urls: dict[str, str] = {}
    for name in where:
        if name == "sqlite":
            urls[name] = f"sqlite:///{tmp_path / 'pond.db'}"
            continue
        server = servers[name] = request.getfixturevalue(
            f"own_{name}" if marker.kwargs.get("own") else f"{name}_server"
        )
        database = f"fault_{uuid4().hex[:12]}"
        urls[name] = server.create_database(database)
        request.addfinalizer(lambda server=server, database=database: server.start().drop_database(database))

    async def on(name: str, scenario: Scenario) -> None:
        try:
            async with ground(name, urls[name], tmp_path / name, servers.get(name)) as here:
                await scenario(here)
        except Exception as e:
            e.add_note(f"on {name}")
            raise

    async def run(scenario: Scenario) -> None:
        ends = await asyncio.gather(*(on(name, scenario) for name in where), return_exceptions=True)
        request.node.user_properties.extend((FAULTS, line) for line in LINES)
        LINES.clear()
        failed = [end for end in ends if isinstance(end, Exception)]
        if len(failed) == 1:
            raise failed[0]
        if failed:
            raise ExceptionGroup("on several databases", failed)

    return run
