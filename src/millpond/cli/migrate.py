"""`millpond migrate`: create or update the tables, or print the SQL for it; declare the queues of a broker."""

import asyncio
from typing import Annotated, Any

import typer

from millpond import transports
from millpond.cli import secret_urls
from millpond.cli.app import URL, Json, Options, Schema, TablePrefix, app, print_result, required_url, store_options
from millpond.errors import InvalidOption
from millpond.table_prefix import TABLE_PREFIX
from millpond.transports.url import Url


@app.command("migrate")
def migrate(
    url: Annotated[
        str | None,
        typer.Argument(
            envvar="MILLPOND_URL",
            show_default=False,
            metavar="URL",
            callback=secret_urls.resolve,
            help="URL of the database or broker; @FILE reads it.",
        ),
    ] = None,
    sql: Annotated[bool, typer.Option("--sql", help="Print the SQL without connecting to the database.")] = False,
    rename: Annotated[bool, typer.Option("--rename", help="First rename the tables of an earlier layout.")] = False,
    queue: Annotated[
        list[str] | None, typer.Option("--queue", help="Queue to declare at a broker; may be repeated.")
    ] = None,
    url_option: URL = None,
    schema: Schema = None,
    table_prefix: TablePrefix = TABLE_PREFIX,
    option: Options = None,
    json: Json = False,
) -> None:
    """Create or update tables, or declare queues at a broker. Safe to repeat."""
    url = required_url(url or url_option)
    if transports.is_shared(url) and not transports.is_database(url) and not (sql or rename):
        names = asyncio.run(_declare(url, queue or [], store_options(url, schema, table_prefix, option)))
        found = f"; used as they exist, with other arguments: {', '.join(names)}" if names else ""
        declared = f"declared {', '.join(queue or []) or 'no queue'} and all wait queues at {Url(url)}{found}"
        print_result(declared, {"declared": queue or [], "used_as_found": names}, json)
        return
    if not transports.is_database(url):
        raise InvalidOption(
            f"{Url(transports.each_url(url)[0]).scheme}:// has no tables to migrate; give the URL of a database"
        )
    if queue:
        raise InvalidOption("--queue is for a broker: in a database, publish creates a queue")
    options = store_options(url, schema, table_prefix, option)
    if sql:
        print(transports.ddl(transports.each_url(url)[0], **options), end="")
        return
    options |= {"migrate": "rename" if rename else True}
    urls = transports.each_url(url)
    if len(urls) > 1:
        each = {str(Url(one)): asyncio.run(_migrate(one, options)) for one in urls}
        lines = [f"applied {', '.join(names) or 'nothing'} to {shown}" for shown, names in each.items()]
        print_result("\n".join(lines), {"shards": {shown: {"applied": names} for shown, names in each.items()}}, json)
        return
    applied = asyncio.run(_migrate(url, options))
    nothing = f"nothing to do: {Url(url)} has the tables of this version"
    print_result(f"applied {', '.join(applied)} to {Url(url)}" if applied else nothing, {"applied": applied}, json)


async def _declare(url: str, queues: list[str], options: dict[str, Any]) -> list[str]:
    """Declare queues at a broker, and return the names of those that exist with other arguments."""
    broker: Any = await transports.connect(url, **options)
    try:
        found: list[str] = await broker.declare(queues)
    finally:
        await broker.close()
    return found


async def _migrate(url: str, options: dict[str, Any]) -> list[str]:
    store = await transports.connect(url, **options)
    await store.close()
    return [f"{m.version:04}_{m.name}" for m in getattr(store, "migrated", ())]
