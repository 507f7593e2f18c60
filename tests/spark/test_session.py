"""`session()`, and the data source that Spark finds by itself."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

from millpond.errors import InvalidOption, InvalidURL
from millpond.spark.options import SparkOptions


def test_format_millpond_is_there(spark: Any) -> None:
    schema = spark.read.format("millpond").option("table", "archive").load().schema
    assert {"id", "queue", "payload", "archived_at", "shard"} <= set(schema.names)
    assert spark.conf.get("spark.sql.session.timeZone") == "UTC"
    assert spark.conf.get("spark.sql.python.filterPushdown.enabled") == "true"


def test_what_spark_looks_for_is_installed_and_cheap() -> None:
    # Spark imports it in every planning process and on executors.
    code = (
        "import pkgutil, sys, pyspark.sql.datasource, pyspark.sql.types\n"
        "assert 'pyspark_millpond' in [module.name for module in pkgutil.iter_modules()]\n"
        "import pyspark_millpond\n"
        "assert pyspark_millpond.DefaultSource.name() == 'millpond'\n"
        "heavy = {'adbc_driver_manager', 'asyncpg', 'asyncmy', 'typer', 'pyarrow.dataset'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    subprocess.run([sys.executable, "-W", "ignore", "-c", code], check=True)


def test_importing_the_package_imports_no_spark() -> None:
    code = "import sys, millpond.spark; assert not {'pyspark', 'pyarrow', 'pandas'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


def options(*known: str, **given: str) -> SparkOptions:
    return SparkOptions(given, known, of="a read")


def test_options_are_read_in_any_case() -> None:
    read = options("minPartitions", "failOnDataLoss", MINPARTITIONS="7", failondataloss="False")
    assert read.integer("minPartitions", 1, 1, 100) == 7
    assert read.flag("failOnDataLoss", True) is False


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"tabel": "archive"}, "the nearest one is 'table'"),
        ({"table": "orders"}, "must be one of messages, archive"),
        ({"minPartitions": "many"}, "integer from 1 to"),
        ({"minPartitions": "0"}, "integer from 1 to"),
        ({"flag": "perhaps"}, "true or false"),
        ({"queue": "a,b"}, r'\["a", "b"\]'),
        ({"queue": "[a]"}, "no JSON list"),
        ({}, "needs the option 'queue'"),
        ({"queue": "q", "name": "x", "alias": "y"}, "are one option"),
    ],
)
def test_a_wrong_option_is_named(given: dict[str, str], says: str) -> None:
    with pytest.raises(InvalidOption, match=says):
        read = options("table", "minPartitions", "flag", "queue", "name", "alias", **given)
        read.choice("table", ("messages", "archive"), "messages")
        read.integer("minPartitions", 1, 1, 100)
        read.flag("flag", False)
        read.queues()
        read.either("name", "alias")


@pytest.mark.parametrize(
    ("given", "queues"),
    [("orders", ["orders"]), ('["a,b", "[c", "a,b"]', ["a,b", "[c"]), ("Robert'); --", ["Robert'); --"])],
)
def test_queues_by_name_or_as_a_json_list(given: str, queues: list[str]) -> None:
    assert options("queue", queue=given).queues() == queues


def test_urls_are_shards_and_never_show_a_password(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MILLPOND_URL", raising=False)
    urls = "postgresql://u:s3cret@one/db \n mysql://u:s3cret@two/db"
    shards = options(url=urls).listed()
    assert [shard.url.host for shard in shards] == ["one", "two"]
    assert "s3cret" not in repr(shards)
    with pytest.raises(InvalidOption, match="MILLPOND_URL"):
        options().listed()
    with pytest.raises(InvalidOption, match="PONDS of the Spark driver is empty"):
        options(urlEnv="PONDS").listed()
    with pytest.raises(InvalidOption, match="either"):
        options(url=urls, urlEnv="PONDS").listed()
    with pytest.raises(InvalidOption, match="twice"):
        options(url="sqlite:///a.db sqlite:///a.db").listed()
    with pytest.raises(InvalidOption, match="memory"):
        options(url="memory://").listed()
    with pytest.raises(InvalidURL) as wrong:
        options(url="postgresql://u:s3cret@one:port/db").listed()
    assert "s3cret" not in str(wrong.value)
    monkeypatch.setenv("PONDS", urls)
    monkeypatch.setenv("MILLPOND_URL", "sqlite:///a.db")
    assert len(options(urlEnv="PONDS").listed()) == 2
    assert options().listed()[0].url.scheme == "sqlite"
