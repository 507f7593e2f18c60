"""Fixtures for pytest, found by their entry point: the testing kit around the pond of the program.

The setting `millpond_pond` names it, as in `millpond run`: `millpond_pond = "shop.orders:pond"`.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from typing import TYPE_CHECKING, Any, TypeVar, cast

import pytest

if TYPE_CHECKING:
    from millpond import Millpond
    from millpond.testing import SyncTestPond, TestPond

F = TypeVar("F", bound=Callable[..., Any])


def _async_fixture(function: F) -> F:
    try:
        from pytest_asyncio import fixture
    except ImportError:  # pytest with anyio takes plain fixtures
        return cast(F, pytest.fixture(function))
    return cast(F, fixture(function))


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addini("millpond_pond", "Module and name of the pond under test, e.g. shop.orders:pond.", default="")


@pytest.fixture
def pond_under_test(pytestconfig: pytest.Config) -> Millpond:
    """The pond that the setting `millpond_pond` names. Define a fixture of this name to choose another one."""
    import pkgutil

    from millpond import Millpond

    target = pytestconfig.getini("millpond_pond")
    if not target:
        raise pytest.UsageError('millpond_pond is not set: give it "MODULE:POND", or define a fixture pond_under_test')
    pond = pkgutil.resolve_name(target if ":" in target else f"{target}:pond")
    if not isinstance(pond, Millpond):
        raise pytest.UsageError(f"millpond_pond: {target} is not a Millpond but a {type(pond).__name__}")
    return pond


@pytest.fixture
def millpond_url() -> str:
    """The URL of the messages in tests: in memory. Override it to test with a database."""
    return "memory://"


@pytest.fixture
def pond_test(pond_under_test: Millpond, millpond_url: str) -> Iterator[SyncTestPond]:
    """The testing kit for synchronous tests."""
    with pond_under_test.testing_sync(millpond_url) as test:
        yield test


@_async_fixture
async def async_pond_test(pond_under_test: Millpond, millpond_url: str) -> AsyncIterator[TestPond]:
    """The testing kit for async tests."""
    async with pond_under_test.testing(millpond_url) as test:
        yield test
