"""For applications that manage their own tables with SQLAlchemy and Alembic. Imports neither of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from millpond.errors import InvalidOption
from millpond.table_prefix import TABLE_PREFIX

IncludeName = Callable[[str | None, str, Mapping[str, str | None]], bool]


def exclude(
    table_prefix: str = TABLE_PREFIX, *, schema: str | None = None, then: IncludeName | None = None
) -> IncludeName:
    """Return a filter for Alembic's `include_name`: autogenerate then leaves Millpond's tables alone.

        context.configure(..., include_name=millpond.sqlalchemy.exclude())

    The filter skips every table whose name begins with the prefix, as the daily partitions of the archive do. With
    `schema` it skips those of this schema only. `then` is the application's own filter for all other names.
    """
    if not table_prefix:
        raise InvalidOption("exclude() needs a table_prefix; without one, filter by the schema of Millpond's tables")

    def include_name(name: str | None, type_: str, parent_names: Mapping[str, str | None]) -> bool:
        ours = type_ == "table" and (name or "").startswith(table_prefix)
        if ours and (schema is None or parent_names.get("schema_name") == schema):
            return False
        return then is None or then(name, type_, parent_names)

    return include_name
