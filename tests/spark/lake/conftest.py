from __future__ import annotations

import asyncio

import pytest

import millpond
from millpond.transports.database.exports.exports import DatabaseExports
from millpond.transports.database.mysql.dialect import MysqlDialect
from millpond.transports.database.postgres.dialect import PostgresDialect
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
    """Exports do not wait for other transactions: nothing is settled meanwhile."""
    monkeypatch.setattr(MysqlDialect, "grace", 0.0)
    monkeypatch.setattr(MysqlDialect, "least_grace", 0.0)
    monkeypatch.setattr(PostgresDialect, "grace", 0.0)
    monkeypatch.setattr(DatabaseExports, "patience", 0.2)
