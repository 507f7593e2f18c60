"""`millpond lake`: the archive as Parquet files. Other modules add their commands to `lake_app`."""

from typing import Annotated

import typer

from millpond.cli.app import Json, app, say_json

lake_app = typer.Typer(
    name="lake", help="The archive as Parquet files, by Spark.", no_args_is_help=True, pretty_exceptions_enable=False
)
app.add_typer(lake_app)

Path = Annotated[
    str,
    typer.Argument(envvar="MILLPOND_LAKE", metavar="LAKE", help="The lake's folder, which every executor sees."),
]


@lake_app.command("files")
def files(
    path: Path,
    queue: Annotated[str | None, typer.Option(help="Of this queue only.")] = None,
    day: Annotated[str | None, typer.Option(help="Archived on this day in UTC: 2026-11-16.")] = None,
    json: Json = False,
) -> None:
    """Print the Parquet files that make up a lake, one a line: for tools that read lists of files."""
    from millpond.spark.lake import files

    found = files(path, queue=queue, day=day)
    if json:
        say_json({"files": found})
    else:
        print(*found, sep="\n", end="\n" if found else "")
