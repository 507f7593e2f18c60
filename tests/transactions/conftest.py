"""A migrated database instead of a new one for each test: here are many tests, and none is about its making."""

import pytest

from tests.shared import SharedDatabase


@pytest.fixture
def postgres_url(shared_postgres: SharedDatabase) -> str:
    shared_postgres.empty()
    return shared_postgres.url


@pytest.fixture
def mariadb_url(shared_mariadb: SharedDatabase) -> str:
    shared_mariadb.empty()
    return shared_mariadb.url
