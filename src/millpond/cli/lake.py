"""`millpond lake`: the archive as Parquet files. Other modules add their commands to `lake_app`."""

import asyncio
import signal
import sys
import threading
from datetime import timedelta
from enum import StrEnum
from typing import Annotated, Any

import typer

from millpond.cli import values
from millpond.cli.app import URL, Json, Refused, Schema, TablePrefix, app, needs, say_json
from millpond.cli.spark import Conf, Master, spark_session
from millpond.cli.table import plain, table, when
from millpond.clock import as_datetime
from millpond.errors import InvalidOption

lake_app = typer.Typer(
    name="lake", help="The archive as Parquet files, by Spark.", no_args_is_help=True, pretty_exceptions_enable=False
)
app.add_typer(lake_app)

Lake = Annotated[
    str,
    typer.Option("--lake", envvar="MILLPOND_LAKE", metavar="PATH", help="The lake's folder, which all of Spark sees."),
]
URLs = Annotated[
    str | None,
    typer.Option(
        "--url",
        envvar="MILLPOND_URL",
        show_default=False,
        help="The database; several, with spaces between, as shards.",
    ),
]
Decode = Annotated[
    str | None,
    typer.Option(metavar="FIELDS", help='Make columns of JSON bodies: "sku bigint, price double", or infer.'),
]
Every = Annotated[str, typer.Option(help="How long from the beginning of a round to that of the next: 30s, 10m, 1h.")]


class Step(StrEnum):
    EXPORT = "export"
    PURGE = "purge"
    COMPACT = "compact"
    REPORT = "report"


@lake_app.command("export")
def export(
    lake: Lake,
    url: URLs = None,
    decode: Decode = None,
    follow: Annotated[bool, typer.Option("--follow", help="Go on until told to stop.")] = False,
    every: Every = "10s",
    master: Master = "local[*]",
    conf: Conf = None,
    schema: Schema = None,
    table_prefix: TablePrefix = "",
    json: Json = False,
) -> None:
    """Bring a lake up to date with the archive: what was archived since the last export, each message once."""
    given: dict[str, Any] = {"schema": schema, "table_prefix": table_prefix, "decode": decode}
    pause = _duration(every)
    _check(lake, url, schema, table_prefix)
    with spark_session("millpond lake export", master, _shown(conf)) as spark:
        from millpond.spark.lake.export import export
        from millpond.spark.lake.schedule import run, told

        if follow:
            run(spark, lake, needs(url), steps=["export"], every=pause, stop=_told_to_stop(), tell=_tell, **given)
            return
        done = export(spark, lake, needs(url), **given)
    if json:
        until = {str(shard): when(as_datetime(us)) for shard, us in done.until_us.items()}
        facts = {"messages": done.rows, "files": done.files, "bytes": done.size, "until": until}
        say_json({**facts, "held": list(done.held)})
    else:
        print(told(done))


@lake_app.command("purge")
def purge(
    url: URLs = None,
    older_than: Annotated[
        str | None, typer.Option(help="Archived longer ago than this: 12h, 7d. Default: each queue's retention.")
    ] = None,
    schema: Schema = None,
    table_prefix: TablePrefix = "",
    json: Json = False,
) -> None:
    """Delete from the archive what every lake holds, by each queue's retention or by age."""
    age = values.duration(older_than, "--older-than")
    counts = asyncio.run(_each(needs(url), schema, table_prefix, lambda store: _purge(store, age)))
    say_json({"purged": sum(counts)}) if json else print(f"{sum(counts):,} purged")


async def _purge(store: Any, age: timedelta | None) -> int:
    if not await store.exports():
        raise Refused(f"{store.url} is exported to no lake, so that none holds anything; see millpond purge")
    count: int = await store.purge(older_than=age)
    return count


@lake_app.command("compact")
def compact(lake: Lake, master: Master = "local[*]", conf: Conf = None, json: Json = False) -> None:
    """Merge small files, and delete those that nobody needs any more. Not while an export runs: it would be fenced."""
    with spark_session("millpond lake compact", master, _shown(conf)) as spark:
        from millpond.spark.lake.compact import compact

        done = compact(spark, lake)
    if json:
        say_json({"replaced": done.replaced, "by": done.by, "deleted": done.deleted})
    else:
        print(f"{done.replaced:,} small files became {done.by:,}; {done.deleted:,} deleted that nobody needs")


@lake_app.command("check")
def check(
    lake: Lake,
    url: URLs = None,
    master: Master = "local[*]",
    conf: Conf = None,
    schema: Schema = None,
    table_prefix: TablePrefix = "",
    json: Json = False,
) -> None:
    """Look at every message that the databases still have: is it in the lake, and once?"""
    _check(lake, url, schema, table_prefix)
    with spark_session("millpond lake check", master, _shown(conf)) as spark:
        from millpond.spark.lake.check import check

        done = check(spark, lake, needs(url), schema=schema, table_prefix=table_prefix)
    if json:
        say_json({"looked_at": done.looked_at, "missing": done.missing, "twice": done.twice})
    else:
        print(f"{done.looked_at:,} archived messages looked at, {done.missing:,} missing, {done.twice:,} twice")
    if done.missing or done.twice:
        raise Refused("the lake does not hold what it should: purge nothing, and export to a new lake")


@lake_app.command("run")
def run(
    lake: Lake,
    url: URLs = None,
    every: Every = "10m",
    step: Annotated[list[Step] | None, typer.Option(show_default=False, help="Only this one; again for more.")] = None,
    report_to: Annotated[
        str | None,
        typer.Option(metavar="DIR", show_default=False, help="Write the report there; without it there is none."),
    ] = None,
    decode: Decode = None,
    master: Master = "local[*]",
    conf: Conf = None,
    schema: Schema = None,
    table_prefix: TablePrefix = "",
) -> None:
    """Export, purge, compact and report on a schedule, in one Spark application, until told to stop (TERM)."""
    pause = _duration(every)
    _check(lake, url, schema, table_prefix)
    if step and Step.REPORT in step and report_to is None:
        raise InvalidOption("the step report needs a folder to write to: --report-to DIR")
    with spark_session("millpond lake run", master, _shown(conf)) as spark:
        from millpond.spark.lake.schedule import run

        run(
            spark,
            lake,
            needs(url),
            steps=step,
            every=pause,
            stop=_told_to_stop(),
            tell=_tell,
            report_to=report_to,
            schema=schema,
            table_prefix=table_prefix,
            decode=decode,
        )


@lake_app.command("files")
def files(
    lake: Lake,
    queue: Annotated[str | None, typer.Option(help="Of this queue only.")] = None,
    day: Annotated[str | None, typer.Option(help="Archived on this day in UTC: 2026-11-16.")] = None,
    json: Json = False,
) -> None:
    """Print the Parquet files that make up a lake, one a line: for tools that read lists of files."""
    from millpond.spark.lake.read import files

    found = files(lake, queue=queue, day=day)
    if json:
        say_json({"files": found})
    else:
        print(*found, sep="\n", end="\n" if found else "")


@lake_app.command("exports")
def exports(
    url: URL = None,
    forget: Annotated[str | None, typer.Option(metavar="LAKE", help="Let purge no longer wait for this lake.")] = None,
    schema: Schema = None,
    table_prefix: TablePrefix = "",
    json: Json = False,
) -> None:
    """List the lakes that a database is exported to: purge deletes only what all of them hold."""
    if forget is not None:
        (known,) = asyncio.run(_each(needs(url), schema, table_prefix, lambda store: store.forget_export(forget)))
        if not known:
            raise Refused(f"this database is exported to no lake {forget!r}; millpond lake exports lists them")
        say_json({"forgotten": forget}) if json else print(f"purge no longer waits for {plain(forget)}")
        return
    (found,) = asyncio.run(_each(needs(url), schema, table_prefix, lambda store: store.exports()))
    until = [None if one.until_us is None else when(as_datetime(one.until_us)) for one in found]
    if json:
        facts = [
            {"lake": o.lake, "path": o.path, "shard": o.shard, "until": u} for o, u in zip(found, until, strict=True)
        ]
        say_json({"exports": facts})
    elif found:
        rows = [[o.lake, plain(o.path), str(o.shard), u or "nothing yet"] for o, u in zip(found, until, strict=True)]
        table(["lake", "folder", "shard", "holds what was archived before"], rows, right=(2,))
    else:
        print("exported to no lake")


async def _each(urls: str, schema: str | None, table_prefix: str, do: Any) -> list[Any]:
    """On each of the databases, one after the other."""
    from millpond import transports
    from millpond.spark.lake.export import shards_of

    found = []
    for shard in shards_of(urls, schema, table_prefix):
        store = await transports.connect(shard.url.raw, migrate=False, **shard.options)
        try:
            found.append(await do(store))
        finally:
            await store.close()
    return found


def _check(lake: str, url: str | None, schema: str | None, table_prefix: str) -> None:
    """What is wrong with what was typed is told before Spark starts."""
    from millpond.spark.lake.export import shards_of
    from millpond.spark.lake.manifest import folder

    folder(lake)
    shards_of(needs(url), schema, table_prefix)


def _shown(conf: list[str] | None) -> list[str]:
    """On a terminal Spark draws how far its tasks are."""
    return ["spark.ui.showConsoleProgress=true", *(conf or ())] if sys.stderr.isatty() else conf or []


def _duration(every: str) -> timedelta:
    return values.duration(every, "--every") or timedelta(0)


def _tell(step: str, what: str) -> None:
    from datetime import UTC, datetime

    print(f"{when(datetime.now(UTC))} {step}: {what}", flush=True)


def _told_to_stop() -> threading.Event:
    """Set by the first TERM or INT, so that the step under way is finished; the second one ends it at once."""
    stop = threading.Event()

    def told(number: int, _: object) -> None:
        stop.set()
        signal.signal(number, signal.SIG_DFL)

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, told)
    return stop
