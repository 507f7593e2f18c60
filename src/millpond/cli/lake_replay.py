"""`millpond lake replay`: publish again what a filter in Spark's SQL selects."""

from typing import Annotated

import typer

from millpond.cli.app import Json, Schema, TablePrefix, needs, say_json
from millpond.cli.lake import URLs, lake_app
from millpond.cli.lake_report import Lake
from millpond.cli.spark import Conf, Master, source_options, spark_session
from millpond.cli.table import plain, table
from millpond.errors import InvalidOption


@lake_app.command("replay")
def replay(
    where: Annotated[str, typer.Option(help="Which: a filter in Spark's SQL, over the columns of the archive.")],
    name: Annotated[
        str | None,
        typer.Option(help="Of this replay: running it again under the same name is harmless.", show_default=False),
    ] = None,
    lake: Lake = None,
    url: URLs = None,
    schema: Schema = None,
    table_prefix: TablePrefix = "",
    to: Annotated[str | None, typer.Option("--to", metavar="QUEUE", help="Into this queue instead.")] = None,
    rate: Annotated[float | None, typer.Option(help="So many a second fall due, at most.")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only count what is selected.")] = False,
    master: Master = "local[*]",
    conf: Conf = None,
    json: Json = False,
) -> None:
    """Publish settled messages again, of the lake or the archive: those that a filter selects, each once."""
    if name is None and not dry_run:
        raise InvalidOption("a replay needs a --name: with it, running it again publishes only what is missing")
    if not (dry_run and lake):
        needs(url)
    database = source_options(url, schema, table_prefix) if url else None
    with spark_session("millpond lake replay", master, conf) as spark:
        from millpond.spark import replay as replaying

        chosen = replaying.selected(spark, where, lake=lake, database=database)
        if dry_run:
            _tell_counts(replaying.counts(chosen), json)
            return
        done = replaying.replay(chosen, name=name or "", database=database or {}, to=to, rate=rate)
    if json:
        say_json({"selected": done.selected, "published": done.published})
    else:
        before = done.selected - done.published
        print(f"{done.published:,} published" + (f", {before:,} had been published before" if before else ""))


def _tell_counts(counts: list[dict[str, object]], json: bool) -> None:
    total = sum(int(str(row["messages"])) for row in counts)
    if json:
        say_json({"selected": total, "counts": counts})
        return
    if counts:
        rows = [[plain(str(row["queue"])), str(row["state"]), f"{row['messages']:,}"] for row in counts]
        table(["queue", "state", "messages"], rows, right=[2])
    print(f"{total:,} selected; nothing was published")
