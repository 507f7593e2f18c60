from __future__ import annotations

import asyncio

import pytest

import millpond
from millpond.transports.database.mysql import MysqlDialect
from millpond.transports.database.postgres import PostgresDialect
from tests.cli.conftest import cli
from tests.shared import KINDS, empty_database

__all__ = ["cli"]


@pytest.fixture(params=KINDS)
def url(request: pytest.FixtureRequest) -> str:
    """A migrated database of each kind, empty."""
    url = empty_database(request, request.param)
    if request.param == "sqlite":
        asyncio.run(_migrate(url))
    return url


async def _migrate(url: str) -> None:
    await (await millpond.connect(url, migrate=True)).close()


@pytest.fixture
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where nothing is settled meanwhile, an export need not wait."""
    monkeypatch.setattr(MysqlDialect, "grace", 0.0)
    monkeypatch.setattr(PostgresDialect, "grace", 0.0)
    monkeypatch.setattr("millpond.transports.database.exporting.PATIENCE", 0.2)
