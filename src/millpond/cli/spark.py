"""What the commands that run on Spark share: the session, and the databases that it reads."""

import contextlib
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from millpond import errors
from millpond.cli.app import Refused
from millpond.errors import InvalidOption

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_OURS = re.compile(r"^millpond\.errors\.(\w+): (.+)$", re.MULTILINE)

Master = Annotated[str, typer.Option(help="Where Spark runs: local[*], spark://host:7077, ….")]
Conf = Annotated[
    list[str] | None,
    typer.Option(metavar="NAME=VALUE", show_default=False, help="A setting of Spark's; again for more."),
]


@contextlib.contextmanager
def spark_session(app: str, master: str, conf: Sequence[str] | None) -> Iterator["SparkSession"]:
    """A session for one command; one that was there before stays."""
    import millpond.spark

    settings = {}
    for setting in conf or ():
        name, equals, value = setting.partition("=")
        if not equals:
            raise InvalidOption(f"--conf {setting!r} must be written as NAME=VALUE")
        settings[name.strip()] = value.strip()
    active = _active()
    spark = millpond.spark.session(app, master, settings)
    from pyspark.errors import PySparkException

    try:
        yield spark
    except PySparkException as e:
        raise _ours(str(e)) from e
    finally:
        if not active:
            spark.stop()


def _ours(text: str) -> Exception:
    """What one of our own parts said inside Spark, without the traces around it; else what Spark said."""
    found = _OURS.findall(text)
    if found:
        name, said = found[-1]
        error: Exception = getattr(errors, name, Refused)(said)
        return error
    return Refused(f"Spark: {text.partition(chr(10))[0]}")


def _active() -> bool:
    if "pyspark" not in sys.modules:  # nobody can have started one
        return False
    from pyspark.sql import SparkSession

    return SparkSession.getActiveSession() is not None


def source_options(url: str, schema: str | None, table_prefix: str) -> Mapping[str, str]:
    """Of `format("millpond")`."""
    given = {"url": url, "schema": schema, "tablePrefix": table_prefix}
    return {name: value for name, value in given.items() if value}
