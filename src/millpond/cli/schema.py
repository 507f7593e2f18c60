"""`millpond migrate`: make or update the tables, or print how."""

import asyncio
from typing import Annotated, Any

import typer

from millpond import transports
from millpond.cli.app import URL, Json, Schema, TablePrefix, app, needs, say_json, store_options
from millpond.errors import not_supported
from millpond.transport import Capability
from millpond.transports.url import Url


@app.command("migrate")
def migrate(
    url: Annotated[str | None, typer.Argument(envvar="MILLPOND_URL", show_default=False, metavar="URL")] = None,
    sql: Annotated[bool, typer.Option("--sql", help="Print the SQL instead; nothing is connected.")] = False,
    url_option: URL = None,
    schema: Schema = None,
    table_prefix: TablePrefix = "",
    json: Json = False,
) -> None:
    """Make or update Millpond's tables. Safe to run again, and by many at once."""
    url = needs(url or url_option)
    options = store_options(schema, table_prefix)
    if sql:
        print(transports.ddl(url, **options), end="")
        return
    applied = asyncio.run(_migrate(url, options))
    if json:
        say_json({"applied": applied})
    elif applied:
        print(f"applied {', '.join(applied)} to {Url(url)}")
    else:
        print(f"nothing to do: {Url(url)} has the tables of this version")


async def _migrate(url: str, options: dict[str, Any]) -> list[str]:
    if not transports.is_database(url):
        raise not_supported("migrating", Capability.DURABLE)
    store = await transports.connect(url, **options, migrate=True)
    await store.close()
    return [f"{m.version:04}_{m.name}" for m in getattr(store, "migrated", ())]
