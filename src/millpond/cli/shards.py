"""`millpond shards`: make several databases one pond, show them, and change the shard map."""

import asyncio
import functools
from collections.abc import Callable
from typing import Annotated, Any, NamedTuple

import typer

from millpond import transports
from millpond.cli import secret_urls
from millpond.cli.app import Json, Work, add_options, app, print_json, required_url, store_options
from millpond.cli.table import plain, table
from millpond.clock import monotonic
from millpond.errors import InvalidOption
from millpond.seam.shards import MoveProgress, ShardStatus
from millpond.transports.key_range import KeyRange
from millpond.transports.shard_map import ShardMap

shards = typer.Typer(help="Make several databases one pond, show them, and change their map.", no_args_is_help=True)
app.add_typer(shards, name="shards")

Urls = Annotated[
    list[str] | None,
    typer.Argument(metavar="URL...", show_default=False, help="URLs of the shards; @FILE reads one. Default: --url."),
]

To = Annotated[str, typer.Option(metavar="NAME", show_default=False, help="Name of the shard that gets the keys.")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Count the messages that would move; change nothing.")]


class Pond(NamedTuple):
    """The databases that the arguments name, and the options of their stores."""

    urls: list[str]
    options: dict[str, Any]


def _command(name: str, *, migrate: bool = False, ranges: bool = False) -> Callable[[Work], Work]:
    """Register an async function as a command of this group; its first argument is the pond.

    The command adds the URLs, and the options for schema and table prefix. `ranges`: an argument is a key range.
    """

    def register(function: Work) -> Work:
        @functools.wraps(function)
        def run(
            *,
            urls: list[str] | None,
            url: str | None,
            schema: str | None,
            table_prefix: str,
            option: list[str] | None,
            **given: Any,
        ) -> None:
            found = _urls(urls, url)
            options = store_options(" ".join(found), schema, table_prefix, option) | {"migrate": migrate}
            asyncio.run(function(Pond(found, options), **given))

        add_options(run, function, ("urls", Urls, None))
        # A key range such as -80 looks like an option.
        shards.command(name, context_settings={"ignore_unknown_options": True} if ranges else None)(run)
        return function

    return register


@_command("init", migrate=True)
async def init(
    pond: Pond,
    names: Annotated[
        str | None, typer.Option(metavar="A,B", show_default=False, help="Names of the shards; default: s0,s1,…")
    ] = None,
    with_messages: Annotated[
        bool, typer.Option("--with-messages", help="Accept databases that have messages; these stay there.")
    ] = False,
    json: Json = False,
) -> None:
    """Create the tables and one shard map on all databases. Safe to repeat."""
    chosen = None if names is None else [name.strip() for name in names.split(",")]
    map_ = await transports.init_shards(pond.urls, names=chosen, with_messages=with_messages, **pond.options)
    _print_map(map_, json)


@_command("status")
async def status(pond: Pond, json: Json = False) -> None:
    """Print each shard with its key ranges, its messages and the time of its answer."""
    found = await transports.shard_status(pond.urls, **pond.options)
    if json:
        print_json({"shards": [_facts(one) for one in found]})
        return
    for one in found:
        if not one.answers:
            typer.echo(f"{plain(one.name) or plain(one.url)} does not answer: {plain(one.error or '')}", err=True)
        if one.change:
            typer.echo(f"pending change: {plain(one.change)}; the same command continues it", err=True)
    if not any(one.change for one in found) and (copies := sum(one.incoming or 0 for one in found)):
        typer.echo(f"{copies:,} copies of a sweep that was interrupted; finish it: millpond shards sweep", err=True)
    if not any(one.change for one in found) and len({one.version for one in found if one.version is not None}) > 1:
        typer.echo(
            "an old shard map, as after a restore; give the newest to all shards: millpond shards sweep", err=True
        )
    rows = [_line(one) for one in found]
    table(["shard", "key ranges", "map", "live", "answer", "url"], rows, right=range(2, 5), empty="no shards")


@_command("add", migrate=True)
async def add(
    pond: Pond,
    name: Annotated[str, typer.Argument(metavar="NAME", show_default=False, help="Name of the new shard.")],
    json: Json = False,
) -> None:
    """Add an empty database to the pond, without a key range. Safe to repeat."""
    _print_map(await transports.add_shard(pond.urls, name, **pond.options), json)


@_command("move", ranges=True)
async def move(
    pond: Pond,
    wanted: Annotated[
        str, typer.Argument(metavar="RANGE", show_default=False, help="Key range, such as 40-80, or a shard's name.")
    ],
    to: To,
    dry_run: DryRun = False,
    json: Json = False,
) -> None:
    """Move a key range to another shard. Safe to repeat, and to continue."""
    await _move(pond, wanted, to, json, dry_run=dry_run)


@_command("split", ranges=True)
async def split(
    pond: Pond,
    wanted: Annotated[
        str, typer.Argument(metavar="RANGE", show_default=False, help="Key range to split, such as -80.")
    ],
    to: To,
    at: Annotated[
        str | None,
        typer.Option(metavar="HEX", show_default=False, help="Start of the upper part; default: middle."),
    ] = None,
    dry_run: DryRun = False,
    json: Json = False,
) -> None:
    """Move the upper part of a key range to another shard. Safe to repeat."""
    await _move(pond, str(KeyRange.parse(wanted).upper(at)), to, json, dry_run=dry_run)


@_command("merge")
async def merge(
    pond: Pond,
    name: Annotated[
        str, typer.Argument(metavar="NAME", show_default=False, help="Name of the shard that gives all its ranges.")
    ],
    to: To,
    dry_run: DryRun = False,
    json: Json = False,
) -> None:
    """Move all key ranges of one shard to another one. Safe to repeat."""
    await _move(pond, name, to, json, dry_run=dry_run)


@_command("sweep")
async def sweep(pond: Pond, dry_run: DryRun = False, json: Json = False) -> None:
    """Move waiting messages to their owners that plain SQL wrote on other shards. Safe to repeat."""
    done = await transports.sweep_shards(pond.urls, dry_run=dry_run, **pond.options)
    _print_moves(done, json, dry_run, "none found")


@_command("abort")
async def abort(pond: Pond, json: Json = False) -> None:
    """Undo a pending change before its point of no return."""
    change = await transports.abort_move(pond.urls, **pond.options)
    if json:
        print_json({"aborted": None if change is None else str(change)})
    else:
        typer.echo("no change of the shard map is pending" if change is None else f"undone: {change}")


async def _move(pond: Pond, wanted: str, to: str, json: bool, *, dry_run: bool) -> None:
    show = None if json else _Show()
    done = await transports.move_range(pond.urls, wanted, to, dry_run=dry_run, on_progress=show, **pond.options)
    _print_moves(done, json, dry_run, f"{plain(to)} has {plain(wanted)}")


def _print_moves(done: list[MoveProgress], json: bool, dry_run: bool, empty: str) -> None:
    if json:
        print_json({"dry_run": dry_run, "moves": [_move_facts(one) for one in done]})
        return
    rows = [[str(one.change), f"{one.moved:,}", f"{one.left:,}", f"{one.claimed:,}"] for one in done]
    table(["change", "moved", "waiting", "claimed"], rows, right=range(1, 4), empty=empty)


def _move_facts(one: MoveProgress) -> dict[str, Any]:
    return {"change": str(one.change), "moved": one.moved, "waiting": one.left, "claimed": one.claimed}


class _Show:
    """Prints progress on stderr: each new step, and counts at most once in a second."""

    def __init__(self) -> None:
        self._step, self._at = "", 0.0

    def __call__(self, progress: MoveProgress) -> None:
        if progress.step != self._step or monotonic() - self._at >= 1:
            self._step, self._at = progress.step, monotonic()
            counts = f"{progress.moved:,} moved, {progress.left:,} waiting, {progress.claimed:,} claimed"
            typer.echo(f"{progress.change}: {progress.step} ({counts})", err=True)


def _urls(urls: list[str] | None, url: str | None) -> list[str]:
    """The URLs of the arguments, or of --url."""
    given = [secret_urls.resolve(one) or "" for one in urls or ()]
    found = [one for text in given or [required_url(url)] for one in transports.each_url(text)]
    for one in found:
        if not transports.is_database(one):
            raise InvalidOption("a shard must be a database; give URLs of PostgreSQL, MySQL, MariaDB or SQLite")
    return found


def _print_map(map_: ShardMap, json: bool) -> None:
    if json:
        print_json({"version": map_.version, "shards": {name: map_.ranges_of(name) for name in map_.shards}})
    else:
        rows = [[plain(name), ", ".join(map_.ranges_of(name))] for name in map_.shards]
        table(["shard", "key ranges"], rows, right=())


def _facts(one: ShardStatus) -> dict[str, Any]:
    return {
        "name": one.name or None,
        "url": one.url,
        "key_ranges": one.ranges,
        "version": one.version,
        "answers": one.answers,
        "error": one.error,
        "seconds": None if one.seconds is None else round(one.seconds, 4),
        "live": one.live,
        "incoming": one.incoming,
        "change": one.change,
    }


def _line(one: ShardStatus) -> list[str]:
    return [
        plain(one.name) or "?",
        ", ".join(one.ranges) or ("no shard map" if one.answers and one.version is None else ""),
        "" if one.version is None else str(one.version),
        "" if one.live is None else f"{one.live:,}",
        "none" if one.seconds is None else f"{one.seconds * 1000:.1f} ms",
        plain(one.url),
    ]
