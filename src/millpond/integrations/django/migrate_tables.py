"""Create and update Millpond's tables in a database of Django."""

from __future__ import annotations

import asyncio

from django.db import connections

from millpond import transports
from millpond.integrations.django.project import database_url, options
from millpond.loop import outside_loop
from millpond.table_prefix import TABLE_PREFIX


def migrate(using: str, verbosity: int) -> None:
    connection = connections[using]
    url = database_url(using)
    if connection.vendor == "sqlite" and connection.is_in_memory_db():
        _create_in_memory(using)
    else:
        outside_loop(lambda: asyncio.run(_migrate(url)))
    if verbosity > 1:
        print("  Millpond's tables are up to date.")


async def _migrate(url: str) -> None:
    await (await transports.connect(url, **{**options(), "migrate": True})).close()


def _create_in_memory(using: str) -> None:
    """Tests of Django use SQLite in memory by default. Only Django's own connection reaches such a database."""
    connection = connections[using]
    given = {name: value for name, value in options().items() if name in ("table_prefix", "schema")}
    if f"{given.get('table_prefix', TABLE_PREFIX)}message" not in connection.introspection.table_names():
        connection.ensure_connection()
        connection.connection.executescript(transports.ddl("sqlite:///memory", **given))
