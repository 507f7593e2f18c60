"""Replaces the names of the earlier layout: indexes first, then all tables in one statement.

Each statement commits by itself here. If it is cut short, the tables still have their old names, and a repetition
renames the other indexes.
"""

from __future__ import annotations

from collections.abc import Mapping

from millpond.transports.database.sql.dialect import Dialect
from millpond.transports.database.sql.statement import Query, Statement, Steps

_INDEXES = """
SELECT DISTINCT index_name, table_name FROM information_schema.statistics
WHERE table_schema = coalesce(:schema, database()) AND table_name IN (:*tables)
"""


def rename_tables(d: Dialect, tables: Mapping[str, str]) -> Steps[None]:
    """Rename all. `tables`: old name -> new name."""
    rows = yield Query(Statement(_INDEXES), {"schema": d.schema, "tables": list(tables)})
    for name, table in rows:
        # An index has its table's name, and more. One that was renamed before begins otherwise.
        new = tables[table] + str(name)[len(table) :]
        if str(name).startswith(f"{table}_") and new != name:
            change = f"RENAME INDEX {d.quote(str(name))} TO {d.quote(new)}"
            yield Query(Statement(f"ALTER TABLE {d.qualified(str(table))} {change}"), {})
    changes = [f"{d.qualified(old)} TO {d.qualified(new)}" for old, new in tables.items() if old != new]
    yield Query(Statement(f"RENAME TABLE {', '.join(changes)}"), {})
