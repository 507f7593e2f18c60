"""Replaces the names of the earlier layout. An index cannot be renamed here: it is made anew."""

from __future__ import annotations

from collections.abc import Mapping

from millpond.transports.database.sql.dialect import Dialect
from millpond.transports.database.sql.statement import Query, Statement, Steps

_INDEXES = (
    "SELECT name, tbl_name, sql FROM sqlite_master WHERE type = 'index' AND sql IS NOT NULL AND tbl_name IN (:*tables)"
)


def rename_tables(d: Dialect, tables: Mapping[str, str]) -> Steps[None]:
    """Rename all in one transaction. `tables`: old name -> new name."""
    for old, new in tables.items():
        if old != new:
            yield Query(Statement(f"ALTER TABLE {d.quote(old)} RENAME TO {d.quote(new)}"), {})
    old_of = {new: old for old, new in tables.items()}
    for name, table, text in (yield Query(Statement(_INDEXES), {"tables": list(old_of)})):
        new = table + str(name).removeprefix(old_of[table])
        if new != name:
            yield Query(Statement(f"DROP INDEX {d.quote(str(name))}"), {})
            yield Query(Statement(str(text).replace(f"INDEX {name} ", f"INDEX {d.quote(new)} ", 1)), {})
