"""The columns of a message are listed once; tables and moves have the same."""

import sqlite3

from millpond.transports.database.migration.migrate import ddl
from millpond.transports.database.sql.columns import WAITING
from millpond.transports.database.sqlite.dialect import SqliteDialect

CLAIM_TRACES = {"worker", "token", "lease", "lease_until", "lane", "written", "ahead"}
"""Columns of a waiting message that a move leaves behind: the last claim and the place in the order set them."""


def columns(table: str) -> set[str]:
    connection = sqlite3.connect(":memory:")
    connection.executescript(ddl(SqliteDialect()))
    return {name for (name,) in connection.execute("SELECT name FROM pragma_table_xinfo(?)", [table])}


def test_a_move_takes_every_column_of_a_waiting_message_along() -> None:
    assert columns("millpond_message") - CLAIM_TRACES == set(WAITING)
    assert columns("millpond_incoming") - {"source", "epoch"} == set(WAITING)
