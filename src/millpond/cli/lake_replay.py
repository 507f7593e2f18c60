"""`millpond lake replay`: publish the messages again that a Spark SQL filter selects."""

from typing import Annotated

import typer

from millpond.cli.app import Json, Schema, TablePrefix, print_json, print_result, required_url
from millpond.cli.arguments import ToQueue
from millpond.cli.lake import Pooler, URLs, lake_app
from millpond.cli.lake_report import Lake
from millpond.cli.spark_session import Conf, Master, source_options, spark_session
from millpond.cli.table import plain, table
from millpond.errors import InvalidOption
from millpond.table_prefix import TABLE_PREFIX


@lake_app.command("replay")
def replay(
    where: Annotated[str, typer.Option(help="Spark SQL filter over the columns of the archive.")],
    name: Annotated[
        str | None,
        typer.Option(help="Name of the replay; the same name publishes each message once.", show_default=False),
    ] = None,
    lake: Lake = None,
    url: URLs = None,
    schema: Schema = None,
    table_prefix: TablePrefix = TABLE_PREFIX,
    to: ToQueue = None,
    rate: Annotated[float | None, typer.Option(help="Maximum number of messages that become due per second.")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only count the selected messages.")] = False,
    pooler: Pooler = False,
    master: Master = "local[*]",
    conf: Conf = None,
    json: Json = False,
) -> None:
    """Publish messages of a lake or archive again, selected by a filter."""
    if name is None and not dry_run:
        raise InvalidOption("a replay needs a --name: repeated under the same name, it publishes only missing messages")
    if not (dry_run and lake):
        required_url(url)
    database = source_options(url, schema, table_prefix, pooler) if url else None
    with spark_session("millpond lake replay", master, conf) as spark:
        from millpond.spark import replay as replaying

        chosen = replaying.selected(spark, where, lake=lake, database=database)
        if dry_run:
            _print_counts(replaying.counts(chosen), json)
            return
        done = replaying.replay(chosen, name=name or "", database=database or {}, to=to, rate=rate)
    before = done.selected - done.published
    text = f"{done.published:,} published" + (f", {before:,} already published" if before else "")
    print_result(text, {"selected": done.selected, "published": done.published}, json)


def _print_counts(counts: list[dict[str, object]], json: bool) -> None:
    total = sum(int(str(row["messages"])) for row in counts)
    if json:
        print_json({"selected": total, "counts": counts})
        return
    if counts:
        rows = [[plain(str(row["queue"])), str(row["state"]), f"{row['messages']:,}"] for row in counts]
        table(["queue", "state", "messages"], rows, right=[2])
    print(f"{total:,} selected; nothing was published")
