"""`millpond lake`: export the archive to Parquet files. Other modules add their commands to `lake_app`."""

import asyncio
import signal
import sys
import threading
from collections.abc import Callable, Coroutine
from datetime import timedelta
from enum import StrEnum
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from millpond.cli import parse, secret_urls
from millpond.cli.app import (
    Declined,
    Json,
    Schema,
    TablePrefix,
    app,
    connect_to,
    print_json,
    print_result,
    required_url,
)
from millpond.cli.arguments import OlderThan
from millpond.cli.spark_session import Conf, Master, spark_session
from millpond.cli.table import plain, table, when
from millpond.cli.user_module import import_user_module
from millpond.clock import SystemClock
from millpond.errors import InvalidOption
from millpond.seam.transport import Transport
from millpond.table_prefix import TABLE_PREFIX

if TYPE_CHECKING:
    from millpond.spark.options import SparkShard

T = TypeVar("T")

lake_app = typer.Typer(
    name="lake",
    help="Export the archive to Parquet files with Spark, and use them.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
app.add_typer(lake_app)

Lake = Annotated[
    str,
    typer.Option(
        "--lake", envvar="MILLPOND_LAKE", metavar="PATH", help="Folder that all machines of Spark see, or s3:// URL."
    ),
]
URLs = Annotated[
    str | None,
    typer.Option(
        "--url",
        envvar="MILLPOND_URL",
        show_default=False,
        callback=secret_urls.resolve,
        help="URLs, separated by spaces, of the database or shards; @FILE reads them.",
    ),
]
Decode = Annotated[
    str | None,
    typer.Option(metavar="FIELDS", help='Columns to decode from JSON bodies: "sku bigint, price double", or infer.'),
]
Redact = Annotated[
    str | None,
    typer.Option(metavar="MODULE:FUNCTION", help="Function of queue and body that returns the body for the lake."),
]
Margin = Annotated[
    str, typer.Option(metavar="TIME", help="Age of the youngest exported messages; covers failover to slow clocks.")
]
Connections = Annotated[
    int | None,
    typer.Option(min=1, show_default=False, help="Maximum number of connections of executors to the databases."),
]
Pooler = Annotated[bool, typer.Option("--pooler", help="Connections pass a pooler in transaction mode (PgBouncer).")]
_EVERY = "Time between the starts of two rounds: 30s, 10m, 1h."


class LakeStep(StrEnum):
    EXPORT = "export"
    PURGE = "purge"
    COMPACT = "compact"
    REPORT = "report"


@lake_app.command("export")
def export(
    lake: Lake,
    url: URLs = None,
    decode: Decode = None,
    redact: Redact = None,
    follow: Annotated[bool, typer.Option("--follow", help="Continue until SIGTERM or SIGINT.")] = False,
    every: Annotated[str, typer.Option(help=f"With --follow: {_EVERY}")] = "10s",
    margin: Margin = "60s",
    connections: Connections = None,
    pooler: Pooler = False,
    master: Master = "local[*]",
    conf: Conf = None,
    schema: Schema = None,
    table_prefix: TablePrefix = TABLE_PREFIX,
    json: Json = False,
) -> None:
    """Export the messages archived since the last export, each once."""
    if follow and json:
        raise InvalidOption("--follow has no JSON output; leave out --json or --follow")
    given: dict[str, Any] = {"schema": schema, "table_prefix": table_prefix, "decode": decode}
    given |= {"redact": _function(redact), "margin": parse.duration(margin, "--margin")}
    given |= {"connections": connections, "pooler": pooler}
    pause, urls = _duration(every), _checked_urls(lake, url, schema, table_prefix, pooler=pooler)
    with spark_session("millpond lake export", master, _with_progress_bar(conf)) as spark:
        from millpond.spark.lake.export import export
        from millpond.spark.lake.schedule import run, summary

        if follow:
            run(spark, lake, urls, steps=["export"], every=pause, stop=_stop_event(), on_step=_print_step, **given)
            return
        done = export(spark, lake, urls, **given)
    until = {str(shard): when(us) for shard, us in done.until_us.items()}
    facts = {"messages": done.rows, "files": done.files, "bytes": done.size, "until": until, "held": list(done.held)}
    print_result(summary(done), {**facts, "away": {str(shard): text for shard, text in done.away.items()}}, json)
    if done.away:
        raise Declined(f"{len(done.away)} of the databases did not answer; the next export takes their messages")


@lake_app.command("purge")
def purge(
    url: URLs = None,
    older_than: OlderThan = None,
    pooler: Pooler = False,
    schema: Schema = None,
    table_prefix: TablePrefix = TABLE_PREFIX,
    json: Json = False,
) -> None:
    """Delete archived messages that every lake holds, by retention or age."""
    age = parse.duration(older_than, "--older-than")

    async def purge_one(store: Transport, shard: "SparkShard") -> int:
        if not await store.exports.status():
            raise Declined(f"{shard.url} is exported to no lake, so no lake holds its messages; use millpond purge")
        return await store.operations.purge(older_than=age)

    count = sum(_each(url, schema, table_prefix, purge_one, pooler=pooler))
    print_result(f"{count:,} purged", {"purged": count}, json)


@lake_app.command("compact")
def compact(lake: Lake, master: Master = "local[*]", conf: Conf = None, json: Json = False) -> None:
    """Merge small files, and delete files that no reader needs.

    Exports may run at the same time. Replaced and uncommitted files are deleted after a week.
    """
    with spark_session("millpond lake compact", master, _with_progress_bar(conf)) as spark:
        from millpond.spark.lake.compact import compact

        done = compact(spark, lake)
    print_result(done.summary(), {"replaced": done.replaced, "written": done.written, "deleted": done.deleted}, json)


@lake_app.command("check")
def check(
    lake: Lake,
    url: URLs = None,
    master: Master = "local[*]",
    conf: Conf = None,
    schema: Schema = None,
    table_prefix: TablePrefix = TABLE_PREFIX,
    repair: Annotated[
        bool, typer.Option("--repair", help="Let the next export take missing messages, and purge the others.")
    ] = False,
    pooler: Pooler = False,
    json: Json = False,
) -> None:
    """Check that every archived message is in the lake exactly once."""
    urls = _checked_urls(lake, url, schema, table_prefix, pooler=pooler)
    with spark_session("millpond lake check", master, _with_progress_bar(conf)) as spark:
        from millpond.spark.lake.verify import check

        done = check(spark, lake, urls, schema=schema, table_prefix=table_prefix, repair=repair, pooler=pooler)
    text = f"{done.checked:,} archived messages checked, {done.missing:,} missing, {done.duplicates:,} duplicates"
    text += f", {done.unreadable:,} with unreadable values" if done.unreadable else ""
    facts = {"checked": done.checked, "missing": done.missing, "duplicates": done.duplicates}
    print_result(text, {**facts, "unreadable": done.unreadable}, json)
    if done.duplicates:
        raise Declined("the lake has duplicates: export to a new lake")
    if done.missing and not repair:
        raise Declined("the lake is incomplete: millpond lake check --repair lets the next export take the rest")


@lake_app.command("run")
def run(
    lake: Lake,
    url: URLs = None,
    every: Annotated[str, typer.Option(help=_EVERY)] = "10m",
    step: Annotated[
        list[LakeStep] | None, typer.Option(show_default=False, help="Run only this step; may be repeated.")
    ] = None,
    report_to: Annotated[
        str | None,
        typer.Option(metavar="DIR", show_default=False, help="Folder for the report; without it no report is written."),
    ] = None,
    decode: Decode = None,
    redact: Redact = None,
    margin: Margin = "60s",
    connections: Connections = None,
    pooler: Pooler = False,
    report_on: Annotated[str, typer.Option(metavar="TIME", help="Time before now that the report covers.")] = "7d",
    master: Master = "local[*]",
    conf: Conf = None,
    schema: Schema = None,
    table_prefix: TablePrefix = TABLE_PREFIX,
) -> None:
    """Export, purge, compact and report on a schedule, until SIGTERM."""
    pause, urls = _duration(every), _checked_urls(lake, url, schema, table_prefix, pooler=pooler)
    if step and LakeStep.REPORT in step and report_to is None:
        raise InvalidOption("the step report needs a folder to write to: --report-to DIR")
    function, age = _function(redact), parse.duration(margin, "--margin")
    with spark_session("millpond lake run", master, _with_progress_bar(conf)) as spark:
        from millpond.spark.lake.schedule import run

        run(
            spark,
            lake,
            urls,
            steps=step,
            every=pause,
            stop=_stop_event(),
            on_step=_print_step,
            report_to=report_to,
            schema=schema,
            table_prefix=table_prefix,
            decode=decode,
            redact=function,
            margin=age,
            connections=connections,
            pooler=pooler,
            report_on=_duration(report_on, "--report-on"),
        )


@lake_app.command("migrate")
def migrate(lake: Lake, json: Json = False) -> None:
    """Make a Delta table of a lake of an earlier version.

    Its files stay where they are. Then run millpond lake check --repair once; after it purge deletes again.
    """
    from millpond.spark.lake.migrate import migrate

    done = migrate(lake)
    facts = {"files": done.files, "rewritten": done.rewritten, "fields_left_out": list(done.fields)}
    print_result(done.summary(), facts, json)


@lake_app.command("files")
def files(
    lake: Lake,
    queue: Annotated[str | None, typer.Option(help="Only files of this queue.")] = None,
    day: Annotated[str | None, typer.Option(help="Only files of this day in UTC: 2026-11-16.")] = None,
    json: Json = False,
) -> None:
    """Print the Parquet files of a lake, one per line."""
    from millpond.spark.lake.read import files

    found = files(lake, queue=queue, day=day)
    if json:
        print_json({"files": found})
    else:
        print(*found, sep="\n", end="\n" if found else "")


@lake_app.command("exports")
def exports(
    url: URLs = None,
    forget: Annotated[
        str | None, typer.Option(metavar="LAKE", help="Id of a lake that purge must no longer wait for.")
    ] = None,
    pooler: Pooler = False,
    schema: Schema = None,
    table_prefix: TablePrefix = TABLE_PREFIX,
    json: Json = False,
) -> None:
    """List the lakes that the databases are exported to.

    Purge deletes only messages that all of them hold.
    """
    each = partial(_each, url, schema, table_prefix, pooler=pooler)
    if forget is not None:
        if not any(each(lambda store, _: store.exports.forget(forget))):
            raise Declined(f"nothing is exported to a lake {forget!r}; millpond lake exports lists the lakes")
        print_result(f"purge no longer waits for {plain(forget)}", {"forgotten": forget}, json)
        return
    found = [e for of_one in each(lambda store, _: store.exports.status()) for e in of_one]
    if json:
        facts = [{"lake": e.lake, "path": e.path, "shard": e.shard, "until": when(e.until_us)} for e in found]
        print_json({"exports": facts})
    else:
        rows = [[e.lake, plain(e.path), str(e.shard), when(e.until_us) or "nothing yet"] for e in found]
        heads = ["lake", "folder", "shard", "holds messages archived before"]
        table(heads, rows, right=[2], empty="exported to no lake")


def _each(
    url: str | None,
    schema: str | None,
    table_prefix: str,
    do: Callable[[Transport, "SparkShard"], Coroutine[Any, Any, T]],
    *,
    pooler: bool,
) -> list[T]:
    """Call `do` with a store of each database, one after the other."""
    from millpond.spark.lake.export import shards_of

    async def one(shard: "SparkShard") -> T:
        async with connect_to(shard.url.raw, schema, table_prefix, pooler=pooler) as store:
            return await do(store, shard)

    return [asyncio.run(one(shard)) for shard in shards_of(required_url(url), schema, table_prefix, pooler=pooler)]


def _checked_urls(lake: str, url: str | None, schema: str | None, table_prefix: str, *, pooler: bool) -> str:
    """The URLs of the databases. Raises for wrong arguments before Spark starts."""
    from millpond.spark.lake.export import shards_of
    from millpond.spark.lake.storage import storage_of

    storage_of(lake)
    shards_of(required_url(url), schema, table_prefix, pooler=pooler)
    return required_url(url)


def _function(target: str | None) -> Callable[[str, bytes], bytes] | None:
    """The function at `module:name`, imported from the current folder too."""
    if target is None:
        return None
    module, _, name = target.partition(":")
    try:
        function = getattr(import_user_module(module), name, None)
    except InvalidOption as e:
        raise InvalidOption(f"--redact {target!r}: {e}") from e
    if not callable(function):
        raise InvalidOption(f"--redact {target!r} is no function; write it as shop.privacy:without_cards")
    found: Callable[[str, bytes], bytes] = function
    return found


def _with_progress_bar(conf: list[str] | None) -> list[str]:
    """On a terminal let Spark draw its progress bar."""
    return ["spark.ui.showConsoleProgress=true", *(conf or ())] if sys.stderr.isatty() else conf or []


def _duration(text: str, option: str = "--every") -> timedelta:
    return parse.duration(text, option) or timedelta(0)


def _print_step(step: str, what: str) -> None:
    print(f"{when(SystemClock().now())} {step}: {what}", flush=True)


def _stop_event() -> threading.Event:
    """An event that the first TERM or INT sets: the current step finishes. The second signal ends the process."""
    stop = threading.Event()

    def stop_once(number: int, _: object) -> None:
        stop.set()
        signal.signal(number, signal.SIG_DFL)

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, stop_once)
    return stop
