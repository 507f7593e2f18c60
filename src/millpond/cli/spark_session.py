"""The Spark session of one command, and options shared by the commands that run on Spark."""

import contextlib
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from millpond import errors
from millpond.cli.app import Declined
from millpond.errors import InvalidOption

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_OWN_ERROR = re.compile(r"^millpond\.errors\.(\w+): (.+)$", re.MULTILINE)

MASTER_HELP = "Spark master: local[*], spark://host:7077, …."
CONF_HELP = "Setting of Spark; may be repeated."
Master = Annotated[str, typer.Option(help=MASTER_HELP)]
Conf = Annotated[list[str] | None, typer.Option(metavar="NAME=VALUE", show_default=False, help=CONF_HELP)]


@contextlib.contextmanager
def spark_session(app: str, master: str, conf: Sequence[str] | None) -> Iterator["SparkSession"]:
    """A session for one command. Stops it afterwards, unless it was active before."""
    import millpond.spark

    settings = {}
    for setting in conf or ():
        name, equals, value = setting.partition("=")
        if not equals:
            raise InvalidOption(f"--conf {setting!r} must be written as NAME=VALUE")
        settings[name.strip()] = value.strip()
    active = _has_active_session()
    spark = millpond.spark.session(app, master, settings)
    from pyspark.errors import PySparkException

    try:
        yield spark
    except PySparkException as e:
        raise _own_error(str(e)) from e
    finally:
        if not active:
            spark.stop()


def _own_error(text: str) -> Exception:
    """Our own error inside Spark's text, without Java traces; otherwise the first line of Spark's text."""
    found = _OWN_ERROR.findall(text)
    if found:
        name, message = found[-1]
        error: Exception = getattr(errors, name, Declined)(message)
        return error
    return Declined(f"Spark: {text.partition(chr(10))[0]}")


def _has_active_session() -> bool:
    if "pyspark" not in sys.modules:  # without it there is no session
        return False
    from pyspark.sql import SparkSession

    return SparkSession.getActiveSession() is not None


def source_options(url: str, schema: str | None, table_prefix: str, pooler: bool) -> Mapping[str, str]:
    """Options of `format("millpond")`."""
    given = {"url": url, "schema": schema, "tablePrefix": table_prefix, "pooler": "true" if pooler else None}
    return {name: value for name, value in given.items() if value is not None}
