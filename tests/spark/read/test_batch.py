"""Batch reads with Spark. Tests without Spark are in test_fetch."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from pyspark.errors import AnalysisException, PySparkException
from pyspark.sql.functions import col, lit

from tests.spark.ponds import HOSTILE, fill, password, rows

pytestmark = pytest.mark.slow_on_servers

TABLES = ("messages", "archive")


def load(spark: Any, url: str, table: str = "messages", **options: str) -> Any:
    return spark.read.format("millpond").options(url=url, table=table, **options).load()


@pytest.mark.parametrize("table", TABLES)
def test_every_row_once_and_as_it_is(spark: Any, filled_url: str, table: str) -> None:
    expected = rows(filled_url, table)
    found = {row.id: row for row in load(spark, filled_url, table).collect()}
    assert len(found) == len(expected) > 0
    for id_, wanted in expected.items():
        row = found[str(id_)]
        assert (row.queue, row.key, bytes(row.payload)) == (wanted.queue, wanted.key, wanted.payload)
        assert (row.priority, row.state, row.shard) == (wanted.priority, wanted.state, 0)
        # Spark passes naive timestamps to Python, in the machine's time zone.
        assert row.created_at.astimezone(UTC) == wanted.created_at
        assert (row.expires_at is None) == (wanted.expires_us is None)


def test_filters_give_the_same_answer_pushed_or_not(spark: Any, filled_url: str) -> None:
    frame = load(spark, filled_url, "archive", columns="id,queue,key,state,priority,created_at")
    everything = frame.collect()
    some, at = everything[3].id, everything[3].created_at
    for chosen, holds in (
        (col("queue") == HOSTILE[1], lambda row: row.queue == HOSTILE[1]),
        (
            col("queue").isin(*HOSTILE[:3]) & (col("state") == "COMPLETED") & col("key").isNotNull(),
            lambda row: row.queue in HOSTILE[:3] and row.state == "COMPLETED" and row.key is not None,
        ),
        (
            (col("created_at") >= lit(at)) & (col("id") >= some) & ~col("priority").isin(1, 2),
            lambda row: row.created_at >= at and row.id >= some and row.priority not in (1, 2),
        ),
        (
            col("queue").contains("ö") & (col("state") > "COMPLETED"),
            lambda row: "ö" in row.queue and row.state > "COMPLETED",
        ),
    ):
        assert sorted(frame.where(chosen).collect()) == sorted(row for row in everything if holds(row))


def test_what_the_database_answers_spark_does_not_look_at_again(spark: Any, filled_url: str) -> None:
    frame = load(spark, filled_url, "archive").where(
        (col("state") == "FAILED") & (col("archived_at") > lit(datetime(2020, 1, 1, tzinfo=UTC))) & (col("queue") > "a")
    )
    plan = frame._jdf.queryExecution().executedPlan().toString()
    assert "queue" in plan.partition("Filter")[2].split("\n")[0]
    assert "state" not in plan.partition("Filter")[2].split("\n")[0]


def test_columns_by_schema_or_by_name(spark: Any, filled_url: str) -> None:
    expected = {(str(row.id), row.queue) for row in rows(filled_url, "archive").values()}
    by_schema = spark.read.format("millpond").options(url=filled_url, table="archive").schema("queue string, id string")
    assert by_schema.load().columns == ["queue", "id"]
    assert {(row.id, row.queue) for row in by_schema.load().collect()} == expected
    by_name = load(spark, filled_url, "archive", columns="id, queue")
    assert by_name.columns == ["id", "queue"]
    assert {tuple(row) for row in by_name.collect()} == expected
    with pytest.raises(PySparkException, match=r"either \.schema"):
        by_schema.option("columns", "id").load().collect()


def test_slices_and_shards_are_read_side_by_side(spark: Any, filled_url: str, tmp_path: Path) -> None:
    other = f"sqlite:///{tmp_path / 'other.db'}"
    fill(other, ["elsewhere"])
    frame = load(spark, f"{filled_url} {other}", minPartitions="6", snapshot="false", columns="id,shard")
    assert frame.rdd.getNumPartitions() == 6
    found = sorted((row.shard, row.id) for row in frame.collect())
    assert found == sorted((n, str(id_)) for n, url in enumerate((filled_url, other)) for id_ in rows(url, "messages"))


def test_nothing_there(spark: Any, filled_url: str, tmp_path: Path) -> None:
    empty = f"sqlite:///{tmp_path / 'empty.db'}"
    fill(empty, [])
    for table in TABLES:
        assert load(spark, empty, table).collect() == []
    assert load(spark, filled_url, "archive").where("queue = 'none'").collect() == []


def test_tables_in_a_schema_with_a_prefix(spark: Any, postgres_url: str) -> None:
    fill(postgres_url, ["orders"], schema="app", table_prefix="my_")
    found = load(spark, postgres_url, "archive", schema="app", tablePrefix="my_")
    assert found.count() == len(rows(postgres_url, "archive", schema="app", table_prefix="my_")) > 0


def test_a_database_without_our_tables(spark: Any, postgres_url: str, mariadb_url: str) -> None:
    for bare in (postgres_url, mariadb_url):
        with pytest.raises(AnalysisException, match="millpond migrate") as wrong:
            load(spark, bare).collect()
        assert password(bare) not in str(wrong.value)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"tabel": "archive"}, "the nearest one is 'table'"),
        ({"columns": "id,nope"}, "no column 'nope'"),
        ({"snapshot": "maybe"}, "true or false"),
        ({"url": "postgresql://u:s3cret@127.0.0.1:1/x?sslmod=require"}, "the nearest one is 'sslmode'"),
        ({"stream": "s", "table": "archive"}, "not both"),
    ],
)
def test_what_is_wrong_is_said(spark: Any, options: dict[str, str], says: str) -> None:
    with pytest.raises(PySparkException, match=says) as wrong:
        spark.read.format("millpond").options(**{"url": "sqlite:///none.db", **options}).load().collect()
    assert "s3cret" not in str(wrong.value)


def test_a_column_of_another_type_is_refused(spark: Any) -> None:
    with pytest.raises(PySparkException, match="is of type string, not bigint"):
        spark.read.format("millpond").options(url="sqlite:///none.db").schema("id bigint").load().collect()


def test_no_password_in_plans(spark: Any, postgres_url: str, capfd: pytest.CaptureFixture[str]) -> None:
    fill(postgres_url, ["orders"])
    frame = load(spark, postgres_url, "archive").where("queue = 'orders'")
    frame.explain(True)
    frame.collect()
    shown = "".join(capfd.readouterr()) + str(frame._jdf.queryExecution().toString())
    assert "BatchScan" in shown and password(postgres_url) not in shown
