"""The typer application, and the parts that its commands share: URL options, connection, JSON output."""

# No postponed annotations: typer reads the ones that `command` builds.

import asyncio
import functools
import inspect
import json
import sys
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from importlib import metadata
from typing import Annotated, Any, TypeVar, get_type_hints
from uuid import UUID

import typer

from millpond import transports
from millpond.cli import actions, secret_urls
from millpond.errors import InvalidOption, InvalidURL, Unsupported
from millpond.seam.transport import Transport
from millpond.table_prefix import TABLE_PREFIX

Work = TypeVar("Work", bound=Callable[..., Coroutine[Any, Any, None]])

app = typer.Typer(
    name="millpond",
    help="Manage message queues in your database. MILLPOND_URL is the default of --url.",
    no_args_is_help=False,
    pretty_exceptions_enable=False,  # they would print local variables, which include passwords
)

URL = Annotated[
    str | None,
    typer.Option(
        "--url",
        envvar="MILLPOND_URL",
        show_default=False,
        callback=secret_urls.resolve,
        help="URL of the database, of shards with spaces between; @FILE reads it.",
    ),
]
Schema = Annotated[
    str | None,
    typer.Option(envvar="MILLPOND_SCHEMA", show_default=False, help="Database schema of Millpond's tables."),
]
TablePrefix = Annotated[
    str,
    typer.Option(envvar="MILLPOND_TABLE_PREFIX", help="Prefix of the table names."),
]
Options = Annotated[
    list[str] | None,
    typer.Option(
        "--option",
        envvar="MILLPOND_OPTIONS",
        metavar="NAME=VALUE",
        show_default=False,
        help="Option of the transport, e.g. call_timeout=5; may be repeated.",
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]


class Declined(Exception):
    """A valid command that could not be done: exit code 1."""


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


def required_url(url: str | None) -> str:
    if not url:
        raise InvalidURL("no database given: pass --url or set MILLPOND_URL, e.g. MILLPOND_URL=sqlite:///orders.db")
    return url


def command(
    name: str, face: Callable[[Transport], Any], group: typer.Typer | None = None, *, action: str | None = None
) -> Callable[[Work], Work]:
    """Register an async function as a command; its first argument is `face(transport)`.

    The command adds the options for URL, schema and table prefix, and connects with them. `action`: the name under
    which a change is recorded, as the server records it.
    """

    def register(function: Work) -> Work:
        @functools.wraps(function)
        def connected(
            *, url: str | None, schema: str | None, table_prefix: str, option: list[str] | None, **given: Any
        ) -> None:
            async def work() -> None:
                async with connect_to(required_url(url), schema, table_prefix, option) as transport:
                    await function(face(transport), **given)
                    if action is not None:
                        await actions.record(transport, action, given)

            asyncio.run(work())

        add_options(connected, function)
        (group or app).command(name)(connected)
        return function

    return register


def add_options(wrapper: Callable[..., None], function: Work, *more: tuple[str, Any, Any]) -> None:
    """Give a wrapper the parameters of the function after its first, `more`, and those for URL, schema and options."""
    hints = get_type_hints(function, include_extras=True)
    own = list(inspect.signature(function).parameters.values())[1:]
    common = [
        *more,
        ("url", URL, None),
        ("schema", Schema, None),
        ("table_prefix", TablePrefix, TABLE_PREFIX),
        ("option", Options, None),
    ]
    parameters = [p.replace(annotation=hints[p.name], kind=p.KEYWORD_ONLY) for p in own] + [
        inspect.Parameter(option, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)
        for option, annotation, default in common
    ]
    wrapper.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    wrapper.__annotations__ = {p.name: p.annotation for p in parameters}


@asynccontextmanager
async def connect_to(
    url: str,
    schema: str | None,
    table_prefix: str,
    texts: list[str] | None = None,
    *,
    pooler: bool = False,
    shards: Sequence[str] | None = None,
) -> AsyncIterator[Transport]:
    """`shards`: names or a key range; messages are claimed from these only."""
    if not transports.is_shared(url):
        raise Unsupported(
            "this transport exists in one process only, so a command would find no messages (it lacks the "
            "capability SHARED); give the URL of a database"
        )
    options = store_options(url, schema, table_prefix, texts)
    url_or_shards = transports.address(url)
    if shards is not None:
        if isinstance(url_or_shards, str):
            raise InvalidOption("--shards and --key-range are for a pond of several URLs")
        options["shards"] = list(shards)
    if transports.is_database(url):
        options |= {"pooler": True} if pooler else {}
        options["migrate"] = False  # a mistyped file name must not become a new, empty database
    transport = await transports.connect(url_or_shards, **options)
    try:
        yield transport
        if missing := transport.missing_shards:
            text = "its messages are" if len(missing) == 1 else "their messages are"
            print(f"millpond: no answer from shard {', '.join(missing)}: {text} not included", file=sys.stderr)
    finally:
        await transport.close()


def store_options(url: str, schema: str | None, table_prefix: str, texts: list[str] | None = None) -> dict[str, Any]:
    """The options that were given; not every backend accepts them."""
    options = transports.parse_options(url, texts or ())
    if "archive" in options:
        options["archive"] = secret_urls.resolve(options["archive"])
    if schema:
        options["schema"] = schema
    if table_prefix != TABLE_PREFIX:
        options["table_prefix"] = table_prefix
    return options


def print_json(value: Any) -> None:
    text = json.dumps(value, ensure_ascii=False, indent=2 if sys.stdout.isatty() else None)
    if not text.isascii():  # terminals obey U+009B as they obey ESC [, and a publisher may have written it
        text = "".join(c if c.isprintable() or c == "\n" else json.dumps(c)[1:-1] for c in text)
    print(text)


def print_result(text: str, facts: Any, json: bool) -> None:
    """Print the text, or with --json the facts."""
    print_json(facts) if json else print(text)


def print_changed(
    ids: list[UUID], what: str, json: bool, *, of: int | None = None, advice: str = "millpond show ID prints its state"
) -> None:
    text = f"{len(ids)} {what}" + (f" of {of}; the others are not waiting" if of and len(ids) < of else "")
    print_result(text, {what: [str(id_) for id_ in ids]}, json)
    if of and not ids:
        raise Declined(f"nothing was {what}: none of these messages is waiting ({advice})")
