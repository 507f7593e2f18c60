"""The typer application, and what its commands share: the URL, the connection, JSON or a table."""

# No postponed annotations: typer reads the ones that are put together here.

import asyncio
import functools
import inspect
import json
import sys
from collections.abc import Callable, Coroutine
from importlib import metadata
from typing import Annotated, Any, TypeVar, get_type_hints

import typer

from millpond import transports
from millpond.errors import InvalidURL, Unsupported
from millpond.transport import Capability, Transport

Work = TypeVar("Work", bound=Callable[..., Coroutine[Any, Any, None]])

app = typer.Typer(
    name="millpond",
    help="Look after the queues in your database. MILLPOND_URL is the default for --url.",
    no_args_is_help=False,
    add_completion=False,
    pretty_exceptions_enable=False,  # they would print local variables, and so passwords
)

URL = Annotated[
    str | None,
    typer.Option("--url", envvar="MILLPOND_URL", show_default=False, help="The database, e.g. sqlite:///orders.db."),
]
Schema = Annotated[
    str | None,
    typer.Option(envvar="MILLPOND_SCHEMA", show_default=False, help="The schema that holds Millpond's tables."),
]
TablePrefix = Annotated[
    str,
    typer.Option(envvar="MILLPOND_TABLE_PREFIX", show_default=False, help="What the tables' names begin with."),
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON, for programs.")]


class Refused(Exception):
    """The command was understood and could not be done: exit code 1."""


@app.callback(invoke_without_command=True)
def _options(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Print tracebacks of errors.")] = False,
) -> None:
    if version:
        print(f"millpond {metadata.version('millpond')}")
        raise typer.Exit
    if context.invoked_subcommand is None:
        print(context.get_help())


def needs(url: str | None) -> str:
    if not url:
        raise InvalidURL("which database? Give --url, or set MILLPOND_URL, e.g. MILLPOND_URL=sqlite:///orders.db")
    return url


def command(name: str, face: Callable[[Transport], Any]) -> Callable[[Work], Work]:
    """Make a command of an async function whose first argument is `face(transport)`.

    The command also takes the URL, the schema and the table prefix, which the function never sees.
    """

    def register(function: Work) -> Work:
        @functools.wraps(function)
        def connected(*, url: str | None, schema: str | None, table_prefix: str, **given: Any) -> None:
            async def work() -> None:
                transport = await connect_to(needs(url), schema, table_prefix)
                try:
                    await function(face(transport), **given)
                finally:
                    await transport.close()

            asyncio.run(work())

        hints = get_type_hints(function, include_extras=True)
        own = list(inspect.signature(function).parameters.values())[1:]
        common = [("url", URL, None), ("schema", Schema, None), ("table_prefix", TablePrefix, "")]
        parameters = [p.replace(annotation=hints[p.name], kind=p.KEYWORD_ONLY) for p in own] + [
            inspect.Parameter(option, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)
            for option, annotation, default in common
        ]
        connected.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        connected.__annotations__ = {p.name: p.annotation for p in parameters}
        app.command(name)(connected)
        return function

    return register


async def connect_to(url: str, schema: str | None, table_prefix: str) -> Transport:
    options = store_options(schema, table_prefix)
    if transports.is_database(url):
        options["migrate"] = False  # a mistyped file name must not become a new, empty database
    transport = await transports.connect(url, **options)
    if Capability.SHARED not in transport.capabilities:
        await transport.close()
        raise Unsupported(
            "this transport lives and dies with one process, so that a command finds nothing in it (it lacks the "
            "capability SHARED); give the URL of a database"
        )
    return transport


def store_options(schema: str | None, table_prefix: str) -> dict[str, Any]:
    """Only what was given: not every backend knows these options."""
    return {name: value for name, value in (("schema", schema), ("table_prefix", table_prefix)) if value}


def say_json(value: Any) -> None:
    print(json.dumps(value, ensure_ascii=False, indent=2 if sys.stdout.isatty() else None))
