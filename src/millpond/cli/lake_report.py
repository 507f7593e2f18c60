"""`millpond lake report`: what happened in the queues, as tables, files and a page."""

from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from millpond.cli import values
from millpond.cli.app import Json, Schema, TablePrefix, say_json
from millpond.cli.lake import URLs, lake_app
from millpond.cli.spark import Conf, Master, source_options, spark_session
from millpond.errors import InvalidOption

if TYPE_CHECKING:
    from millpond.spark.report import Report

Lake = Annotated[
    str | None,
    typer.Option("--lake", envvar="MILLPOND_LAKE", metavar="PATH", show_default=False, help="The lake's folder."),
]


@lake_app.command("report")
def report(
    lake: Lake = None,
    url: URLs = None,
    schema: Schema = None,
    table_prefix: TablePrefix = "",
    since: Annotated[str | None, typer.Option(help="Settled at this moment or later.")] = None,
    until: Annotated[str | None, typer.Option(help="Settled before this moment.")] = None,
    queue: Annotated[list[str] | None, typer.Option(help="Of this queue; again for more.", show_default=False)] = None,
    every: Annotated[str, typer.Option(help="How long a period is: 1m, 1h, 1d.")] = "1h",
    html: Annotated[Path | None, typer.Option(metavar="FILE", help="Write a page with charts.")] = None,
    tables: Annotated[Path | None, typer.Option(metavar="DIR", help="Write the tables as Parquet files.")] = None,
    csv: Annotated[bool, typer.Option("--csv", help="With --tables: as CSV files too.")] = False,
    master: Master = "local[*]",
    conf: Conf = None,
    json: Json = False,
) -> None:
    """Report throughput, waiting and handling times, retries and failures; of the lake, or of the database's archive.

    With a database also what waits there now.
    """
    if not lake and not url:
        raise InvalidOption("a report of what? Give --lake PATH, --url URL, or both")
    if csv and not tables:
        raise InvalidOption("--csv needs --tables DIR, where the files are written")
    period = values.duration(every, "--every") or timedelta(0)
    moments = {"since": values.moment(since, "--since"), "until": values.moment(until, "--until")}
    with spark_session("millpond lake report", master, conf) as spark:
        from millpond.spark.report import report_on

        found = report_on(
            spark,
            lake=lake,
            database=source_options(url, schema, table_prefix) if url else None,
            queues=queue or (),
            every=period,
            **moments,
        )
    written = found.write_tables(tables, csv=csv) if tables else []
    page = found.write_page(html) if html else None
    if json:
        say_json(_facts(found))
        return
    from millpond.cli.report_tables import print_report  # here, since rich takes its time

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
