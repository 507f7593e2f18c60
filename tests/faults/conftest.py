"""Each scenario runs on several databases. Short forms run concurrently, because they mostly wait; long ones (`--long`)
run one after the other, because each needs the machine for itself."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest

from tests.conftest import FAULTS
from tests.faults.disk import small_disk
from tests.faults.report import LINES
from tests.faults.setup import Setup, set_up

Scenario = Callable[[Setup], Awaitable[None]]
Everywhere = Callable[..., Awaitable[None]]

ONLY = "MILLPOND_FAULTS_ON"
"""Environment variable with the databases to run on; default: all."""
SHORT_TIMEOUT, LONG_TIMEOUT = 1200, 7200
HERE = Path(__file__).parent


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line(
        "markers",
        "databases(*names, own=False, small_disk=False, short=None, alone=False): where a scenario runs; own: on "
        "servers to kill; short: the database of the quick form, the others are slow, or with `alone` for long forms",
    )


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "where" in metafunc.fixturenames:
        marker = metafunc.definition.get_closest_marker("databases")
        assert marker is not None, "the marker `databases` is missing"
        long = metafunc.config.getoption("--long")
        names = [name for name in marker.args if name in os.environ.get(ONLY, name)]
        short = None if long else marker.kwargs.get("short")
        wheres = [(name,) for name in names if long or name == short]
        if not long and not marker.kwargs.get("alone"):
            wheres.append(tuple(name for name in names if name != short))
        metafunc.parametrize(
            "where",
            [
                pytest.param(where, id="+".join(where), marks=[pytest.mark.slow] if short not in (None, *where) else [])
                for where in wheres
                if where
            ],
        )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    long = config.getoption("--long")
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.timeout(LONG_TIMEOUT if long else SHORT_TIMEOUT))
            if long:
                item.add_marker(pytest.mark.long)  # in this form every test is long; `-m long` finds them


@pytest.fixture
def long(request: pytest.FixtureRequest) -> bool:
    """Whether to use the sizes of the long form."""
    return bool(request.config.getoption("--long"))


@pytest.fixture
def everywhere(request: pytest.FixtureRequest, where: tuple[str, ...], tmp_path: Path, long: bool) -> Everywhere:
    """Run scenarios on each database of the test, each in a new database; all must pass."""
    marker = request.node.get_closest_marker("databases")
    kind = "own_{}" if marker.kwargs.get("own") else "{}_server"
    on_small_disk = marker.kwargs.get("small_disk", False)
    servers = {name: request.getfixturevalue(kind.format(name)) for name in where if name != "sqlite"}

    def fresh(name: str, folder: Path) -> str:
        if name == "sqlite":
            return f"sqlite:///{folder / 'pond.db'}"
        database = f"fault_{uuid4().hex[:12]}"
        request.addfinalizer(lambda: servers[name].start().drop_database(database))
        return str(servers[name].create_database(database))

    async def on(name: str, scenario: Scenario, folder: Path) -> None:
        server = servers.get(name)
        try:
            with contextlib.ExitStack() as stack:
                if on_small_disk:
                    disk = stack.enter_context(small_disk(f"fault_{uuid4().hex[:12]}", server))
                    url = disk.url
                else:
                    disk, url = None, fresh(name, folder)
                async with set_up(name, url, folder, server, disk=disk, long=long) as here:
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
