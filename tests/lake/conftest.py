from __future__ import annotations

import asyncio

import pytest

import millpond
from millpond.transports.database.mysql import MysqlDialect
from millpond.transports.database.postgres import PostgresDialect
from tests.cli.conftest import cli
from tests.shared import SharedDatabase

__all__ = ["cli"]


@pytest.fixture(params=["sqlite", "postgres", "mariadb"])
def url(request: pytest.FixtureRequest) -> str:
    """A migrated database of each kind, empty."""
    if request.param == "sqlite":
        sqlite: str = request.getfixturevalue("sqlite_url")
        asyncio.run(_migrate(sqlite))
        return sqlite
    shared: SharedDatabase = request.getfixturevalue(f"shared_{request.param}")
    shared.empty()
    return shared.url


async def _migrate(url: str) -> None:
    await (await millpond.connect(url, migrate=True)).close()


@pytest.fixture
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where nothing is settled meanwhile, an export need not wait."""
    monkeypatch.setattr(MysqlDialect, "grace", 0.0)
    monkeypatch.setattr(PostgresDialect, "grace", 0.0)
    monkeypatch.setattr("millpond.transports.database.exporting.PATIENCE", 0.2)
