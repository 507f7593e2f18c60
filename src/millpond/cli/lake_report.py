"""`millpond lake report`: statistics of settled messages as tables, files and an HTML page."""

from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from millpond.cli import parse
from millpond.cli.app import Json, Schema, TablePrefix, print_json
from millpond.cli.lake import Pooler, URLs, lake_app
from millpond.cli.spark_session import Conf, Master, source_options, spark_session
from millpond.errors import InvalidOption
from millpond.table_prefix import TABLE_PREFIX

if TYPE_CHECKING:
    from millpond.spark.report import Report

Lake = Annotated[
    str | None,
    typer.Option("--lake", envvar="MILLPOND_LAKE", metavar="PATH", show_default=False, help="Folder of the lake."),
]


@lake_app.command("report")
def report(
    lake: Lake = None,
    url: URLs = None,
    schema: Schema = None,
    table_prefix: TablePrefix = TABLE_PREFIX,
    since: Annotated[str | None, typer.Option(help="Only messages settled at this time or later.")] = None,
    until: Annotated[str | None, typer.Option(help="Only messages settled before this time.")] = None,
    queue: Annotated[
        list[str] | None, typer.Option(help="Only this queue; may be repeated.", show_default=False)
    ] = None,
    every: Annotated[str, typer.Option(help="Length of a period: 1m, 1h, 1d.")] = "1h",
    html: Annotated[Path | None, typer.Option(metavar="FILE", help="Write an HTML page with charts.")] = None,
    tables: Annotated[Path | None, typer.Option(metavar="DIR", help="Write the tables as Parquet files.")] = None,
    csv: Annotated[bool, typer.Option("--csv", help="With --tables: write CSV files too.")] = False,
    pooler: Pooler = False,
    master: Master = "local[*]",
    conf: Conf = None,
    json: Json = False,
) -> None:
    """Report throughput, waiting and handling times, retries and failures.

    The source is the lake, or the archive of the database. With a database the report also counts waiting messages.
    """
    if not lake and not url:
        raise InvalidOption("no source given: pass --lake PATH, --url URL, or both")
    if csv and not tables:
        raise InvalidOption("--csv needs --tables DIR, where the files are written")
    period = parse.duration(every, "--every") or timedelta(0)
    times: dict[str, Any] = {"since": parse.parse_time(since, "--since"), "until": parse.parse_time(until, "--until")}
    with spark_session("millpond lake report", master, conf) as spark:
        from millpond.spark.report import report_on

        found = report_on(
            spark,
            lake=lake,
            database=source_options(url, schema, table_prefix, pooler) if url else None,
            queues=queue or (),
            every=period,
            **times,
        )
    written = found.write_tables(tables, csv=csv) if tables else []
    page = found.write_page(html) if html else None
    if json:
        print_json(_facts(found))
        return
    from millpond.cli.report_tables import print_report  # imported here: rich is slow to import

    print_report(found)
    if written:
        print(f"\n{len(written)} tables in {tables}")
    if page:
        print(f"{'' if written else chr(10)}page: {page.resolve().as_uri()}")


def _facts(report: "Report") -> dict[str, Any]:
    return {
        name: [{column: _plain(value) for column, value in row.items()} for row in report.rows(name)]
        for name in report.tables
    }


def _plain(value: Any) -> Any:
    return value.astimezone(UTC).isoformat().replace("+00:00", "Z") if isinstance(value, datetime) else value
