"""A dialect replaces shared texts by their names. A misspelt name would silently change nothing."""

import importlib
import pkgutil

import pytest

from millpond.transports import database
from millpond.transports.database.mysql.dialect import MysqlDialect
from millpond.transports.database.postgres.dialect import PostgresDialect
from millpond.transports.database.sql.dialect import Dialect, Named
from millpond.transports.database.sqlite.dialect import SqliteDialect


@pytest.mark.parametrize("dialect", [PostgresDialect, MysqlDialect, SqliteDialect])
def test_every_overridden_name_exists(dialect: type[Dialect]) -> None:
    for module in pkgutil.walk_packages(database.__path__, f"{database.__name__}."):
        importlib.import_module(module.name)
    assert dialect.overrides.keys() <= Named.known


def test_a_named_text_is_replaced_and_a_longer_text_that_contains_it_is_not() -> None:
    text = Named("archived queues", "SELECT 1")
    d = MysqlDialect()
    assert "millpond_archive" in d.sql(text).text
    assert d.sql(f"{text} + 1").text == "SELECT 1 + 1"
    assert d.statement("SELECT {key}").text == "SELECT `key`"
