"""The conformance suite over a client that knows only SQL functions."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

import millpond
from tests.conformance.backends import Backend
from tests.conformance.conftest import connect, pytest_configure, transport
from tests.shared import SharedDatabase
from tests.sql.client import MysqlCalls, PostgresCalls, SqlStore
from tests.stores import clock

__all__ = ["clock", "connect", "pytest_configure", "transport"]

CALLS = {"postgres": PostgresCalls, "mariadb": MysqlCalls}


class SqlClient:
    def __init__(self, kind: str, database: SharedDatabase) -> None:
        self._kind = kind
        self._database = database

    def empty(self) -> None:
        self._database.empty()

    async def connect(self, **options: Any) -> Any:
        store = await millpond.connect(self._database.url, **options)
        return SqlStore(store, CALLS[self._kind](self._database.url))  # type: ignore[arg-type]


@pytest.fixture(scope="session", params=CALLS)
def backend(request: pytest.FixtureRequest) -> Iterator[Backend]:
    yield SqlClient(request.param, request.getfixturevalue(f"shared_{request.param}"))
