"""Arguments of `millpond run`, as typer reads them."""

from enum import StrEnum
from typing import Annotated

import typer

from millpond.cli.logs import LogFormat
from millpond.cli.spark_session import CONF_HELP, MASTER_HELP


class Where(StrEnum):
    HERE = "here"
    SPARK = "spark"


class LogLevel(StrEnum):
    DEBUG = "debug"
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"


Target = Annotated[
    str, typer.Argument(metavar="MODULE[:POND]", help="Module and name of the pond, e.g. shop.orders:pond.")
]
Workers = Annotated[
    int, typer.Option(min=1, max=1000, help="Number of worker processes; more than one run under a supervisor.")
]
Queues = Annotated[
    str | None,
    typer.Option(metavar="A,B", help="Only these queues; default: all of the pond's subscribers.", show_default=False),
]
GracefulTimeout = Annotated[
    str, typer.Option(metavar="DURATION", help="Time for running handlers to finish after a stop signal.")
]
ChosenLogFormat = Annotated[LogFormat, typer.Option(help="Text lines, or one JSON object per line.")]
ChosenLogLevel = Annotated[LogLevel, typer.Option(help="Lowest level that is logged.")]
HealthPort = Annotated[
    int | None, typer.Option(help="Serve /live and /ready on this port; 0: any port.", show_default=False)
]
HealthHost = Annotated[
    str, typer.Option(metavar="ADDRESS", help="Address of --health-port; 0.0.0.0: all IPv4 addresses.")
]
UntilIdle = Annotated[bool, typer.Option(help="Exit when no message is due.")]
EndWhenStuck = Annotated[bool, typer.Option(help="Exit with code 1 when all handlers of a subscriber hang.")]
DeadAfter = Annotated[
    str, typer.Option(metavar="DURATION", help="Time without a beat after which messages may be taken.")
]
CancelCutOff = Annotated[bool, typer.Option(help="Cancel async handlers when no beat succeeds for --dead-after.")]
Reload = Annotated[bool, typer.Option("--reload", help="Start again when a Python file here changes; for development.")]
Shards = Annotated[
    str | None,
    typer.Option(metavar="A,B", help="Only these shards of a pond of several; default: all.", show_default=False),
]
KeyRangeText = Annotated[
    str | None,
    typer.Option(metavar="RANGE", help="Only the shards of this key range, such as -80.", show_default=False),
]
On = Annotated[Where, typer.Option(help="Run on this machine, or on the executors of Spark.")]
Master = Annotated[str, typer.Option(help=f"With --on spark: {MASTER_HELP}")]
Tasks = Annotated[
    int | None,
    typer.Option(min=1, help="With --on spark: number of workers; default: number of cores.", show_default=False),
]
PyFiles = Annotated[
    str | None,
    typer.Option(metavar="A,B", help="With --on spark: Python files to ship to executors.", show_default=False),
]
Archives = Annotated[
    str | None,
    typer.Option(metavar="A,B", help="With --on spark: archives to ship to executors.", show_default=False),
]
Conf = Annotated[
    list[str] | None,
    typer.Option(metavar="NAME=VALUE", help=f"With --on spark: {CONF_HELP}", show_default=False),
]
DriverPort = Annotated[int, typer.Option(help="With --on spark: driver port for tasks; 0: any port.")]
HiddenText = Annotated[str | None, typer.Option(hidden=True)]
HiddenNumber = Annotated[int | None, typer.Option(hidden=True)]
