"""The names of tables: a clash with another program is found before anything is created; old names are replaced.

The earlier layout had no prefix by default, and names such as `message_archive` and `message_queue`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from millpond.errors import SchemaMismatch, TableExists
from millpond.table_prefix import TABLE_PREFIX
from millpond.transports.database.sql.dialect import RELATIONS, ROUTINES, Dialect
from millpond.transports.database.sql.statement import Query, Statement, Steps

_CREATED = re.compile(r"^CREATE (?:OR REPLACE )?(?:UNIQUE )?(?:TABLE|VIEW|INDEX)(?: IF NOT EXISTS)? (\S+)", re.M)
_ROUTINES = re.compile(r"^CREATE (?:OR REPLACE )?(?:FUNCTION|PROCEDURE|TRIGGER) ([^\s(]+)", re.M)

_COLUMNS = {"message": "lease, ahead, crashes", "worker": "beats, dead_after, doubted_at"}
"""Columns that came last to the earlier layout. Tables without them are older, and cannot be used after renaming."""


def old_name(prefix: str, table: str) -> str:
    """The name of a table in the earlier layout."""
    return f"{prefix}message" if table == "message" else f"{prefix}message_{table}"


def relations(d: Dialect) -> Steps[set[str]]:
    """All names that are taken where the tables are, or will be."""
    rows = yield Query(d.sql(RELATIONS), {"schema": d.schema})
    return {str(name) for (name,) in rows}


def old_prefix(d: Dialect, taken: set[str]) -> str | None:
    """The prefix of tables of the earlier layout that this store would continue, or None."""
    for prefix in (d.prefix, "") if d.prefix == TABLE_PREFIX else (d.prefix,):
        if {old_name(prefix, table) for table in ("message", "archive", "migration")} <= taken:
            return prefix
    return None


def check_names(d: Dialect, url: str, texts: Iterable[str]) -> Steps[None]:
    """Raise unless the names of everything that the texts create are free."""
    taken = yield from relations(d)
    if d.table("migration") in taken:
        return  # ours, from a migration that was cut short
    found = old_prefix(d, taken)
    if found is not None:
        raise SchemaMismatch(
            f"the database at {url} has tables of an earlier layout, such as {old_name(found, 'archive')}; stop its "
            f"workers and publishers, then run: millpond migrate --rename {url} (docs/how-to/tables.md)"
        )
    texts = list(texts)
    routines = {str(name).casefold() for (name,) in (yield Query(d.sql(ROUTINES), {"schema": d.schema}))}
    clash = sorted(
        (_names(d, _CREATED, texts) & taken)
        | {name for name in _names(d, _ROUTINES, texts) if name.casefold() in routines}  # MySQL ignores their case
    )
    if clash:
        raise TableExists(
            f"the database at {url} has something else by the name of {', '.join(clash)}; nothing was created. Choose "
            f"other names with --table-prefix or --schema (options table_prefix and schema); the prefix is {d.prefix!r}"
        )


def _names(d: Dialect, pattern: re.Pattern[str], texts: Iterable[str]) -> set[str]:
    return {d.fill(name).rpartition(".")[2].strip('"`') for text in texts for name in pattern.findall(text)}


def rename(d: Dialect, url: str) -> Steps[None]:
    """Give the tables of the earlier layout, if there are any, the names of this one."""
    taken = yield from relations(d)
    prefix = old_prefix(d, taken)
    if d.table("migration") in taken or prefix is None:
        return
    tables = {old_name(prefix, table): d.table(table) for table in d.TABLES if old_name(prefix, table) in taken}
    clash = sorted({new for old, new in tables.items() if old != new} & taken)
    if clash:
        raise TableExists(f"the database at {url} has a table {clash[0]} already; nothing was renamed. Rename it first")
    for table, columns in _COLUMNS.items():
        name = d.qualified(old_name(prefix, table))
        yield Query(Statement(f"SELECT {columns} FROM {name} WHERE 1 = 0"), {})
    yield from d.rename_tables(tables, prefix)
