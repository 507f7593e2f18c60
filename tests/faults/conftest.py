"""Each scenario runs on several databases: the short forms at once, since most of their time is waiting, the
long ones (`--long`) one after the other, so that each has the machine to itself."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest

from tests.conftest import FAULTS
from tests.faults.ground import Ground, ground
from tests.faults.report import LINES

Scenario = Callable[[Ground], Awaitable[None]]
Everywhere = Callable[..., Awaitable[None]]

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
    long = config.getoption("--long")
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.timeout(LONG_TIMEOUT if long else SHORT_TIMEOUT))
            if long:
                item.add_marker(pytest.mark.long)  # in this form each is, so that `-m long` finds them


@pytest.fixture
def long(request: pytest.FixtureRequest) -> bool:
    """Whether sizes are those of the long form."""
    return bool(request.config.getoption("--long"))


@pytest.fixture
def everywhere(request: pytest.FixtureRequest, where: tuple[str, ...], tmp_path: Path, long: bool) -> Everywhere:
    """Runs scenarios on each of the test's databases, each on one of its own; all must hold."""
    marker = request.node.get_closest_marker("databases")
    kind = "own_{}" if marker.kwargs.get("own") else "{}_server"
    servers = {name: request.getfixturevalue(kind.format(name)) for name in where if name != "sqlite"}

    def fresh(name: str, folder: Path) -> str:
        if name == "sqlite":
            return f"sqlite:///{folder / 'pond.db'}"
        database = f"fault_{uuid4().hex[:12]}"
        request.addfinalizer(lambda: servers[name].start().drop_database(database))
        return str(servers[name].create_database(database))

    async def on(name: str, scenario: Scenario, folder: Path) -> None:
        try:
            async with ground(name, fresh(name, folder), folder, servers.get(name)) as here:
                await scenario(here)
        except Exception as e:
            e.add_note(f"on {name}")
            raise

    async def run(*scenarios: Scenario) -> None:
        works = [on(name, each, tmp_path / str(n) / name) for n, each in enumerate(scenarios) for name in where]
        ends: list[Any] = []
        for some in [[work] for work in works] if long else [works]:
            ends += await asyncio.gather(*some, return_exceptions=True)
        request.node.user_properties.extend((FAULTS, line) for line in LINES)
        LINES.clear()
        failed = [end for end in ends if isinstance(end, Exception)]
        if len(failed) == 1:
            raise failed[0]
        if failed:
            raise ExceptionGroup("in several places", failed)

    return run
