"""A shared migrated database instead of a new one for each test: there are many tests, and none is about migration."""

import pytest

from tests.rooms.transactions.caller import Caller
from tests.rooms.transactions.callers import ASYNC, REPEATED, SYNC, params
from tests.shared import SharedDatabase


@pytest.fixture
def postgres_url(shared_postgres: SharedDatabase) -> str:
    shared_postgres.empty()
    return shared_postgres.url


@pytest.fixture
def mariadb_url(shared_mariadb: SharedDatabase) -> str:
    shared_mariadb.empty()
    return shared_mariadb.url


@pytest.fixture(params=params(SYNC | ASYNC, REPEATED, pytest.mark.long))
def caller(request: pytest.FixtureRequest) -> Caller:
    database, opened = (SYNC | ASYNC)[request.param]
    return Caller(request.getfixturevalue(f"{database}_url"), opened, sync=request.param in SYNC)
