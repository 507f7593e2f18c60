"""Replaces the names of the earlier layout: tables with their partitions, indexes, sequences, function and trigger."""

from __future__ import annotations

from collections.abc import Mapping

from millpond.transports.database.sql.dialect import Dialect
from millpond.transports.database.sql.statement import Query, Statement, Steps

# Every relation that belongs to one of our tables, with the name of that table; partitions belong to the archive.
_OWNED = """
WITH ours AS (
SELECT c.oid, c.relname AS name, c.relname AS of FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
WHERE n.nspname = coalesce(:schema, current_schema()) AND c.relname = ANY(:tables::text[]) AND c.relkind IN ('r', 'p')
UNION ALL
SELECT c.oid, c.relname, p.relname FROM pg_inherits i JOIN pg_class c ON c.oid = i.inhrelid
JOIN pg_class p ON p.oid = i.inhparent JOIN pg_namespace n ON n.oid = p.relnamespace
WHERE n.nspname = coalesce(:schema, current_schema()) AND p.relname = ANY(:tables::text[]) AND p.relkind = 'p'
)
SELECT name::text, of::text FROM ours
UNION ALL
SELECT c.relname::text, o.of::text FROM ours o JOIN pg_index i ON i.indrelid = o.oid
JOIN pg_class c ON c.oid = i.indexrelid
UNION ALL
SELECT c.relname::text, o.of::text FROM ours o JOIN pg_depend d ON d.refobjid = o.oid
AND d.refclassid = 'pg_class'::regclass AND d.classid = 'pg_class'::regclass AND d.deptype IN ('a', 'i')
JOIN pg_class c ON c.oid = d.objid AND c.relkind = 'S'
"""


def rename_tables(d: Dialect, tables: Mapping[str, str], prefix: str) -> Steps[None]:
    """Rename all in one transaction. `tables`: old name -> new name."""
    rows = yield Query(Statement(_OWNED), {"schema": d.schema, "tables": list(tables)})
    for name, table in rows:
        # An index, a sequence or a partition has its table's name, and more. ALTER TABLE renames all of them.
        if str(name).startswith(str(table)) and name != (new := tables[table] + str(name)[len(table) :]):
            yield Query(Statement(f"ALTER TABLE {d.qualified(str(name))} RENAME TO {d.quote(new)}"), {})
    if prefix != d.prefix:
        # Not quoted, as where they are created.
        old, new = f"{prefix}message_placed", f"{d.prefix}message_placed"
        yield Query(Statement(d.fill(f"ALTER TRIGGER {old} ON {{message}} RENAME TO {new}")), {})
        yield Query(Statement(d.fill(f"ALTER FUNCTION {{schema_dot}}{old}() RENAME TO {new}")), {})
