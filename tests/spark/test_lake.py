"""The lake with a real Spark: executors write, and Spark, DuckDB and Polars read what is committed and nothing else."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
from datetime import timedelta
from pathlib import Path
from typing import Any

import duckdb
import polars
import psycopg
import pytest

from millpond.spark import lake
from millpond.transports.database.mysql import MysqlDialect
from millpond.transports.database.postgres import PostgresDialect
from servers import SparkCluster
from tests.cli.conftest import Cli, cli
from tests.lake.here import export, lake_rows
from tests.spark.ponds import HOSTILE, fill, password, rows
from tests.spark.test_cluster import on_cluster

__all__ = ["cli"]


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is settled meanwhile."""
    monkeypatch.setattr(MysqlDialect, "grace", 0.0)
    monkeypatch.setattr(PostgresDialect, "grace", 0.0)


def archived(url: str) -> list[str]:
    return sorted(str(id_) for id_ in rows(url, "archive"))


def test_spark_reads_the_archive_as_it_was(spark: Any, filled_url: str, tmp_path: Path) -> None:
    path = tmp_path / "lake"
    done = lake.export(spark, path, filled_url)
    found = lake.read(spark, path)
    source = spark.read.format("millpond").options(url=filled_url, table="archive").load()
    assert found.columns == [*source.columns, "day"]
    assert done.rows == found.count() == source.count() > 0
    assert found.drop("day").exceptAll(source).count() == 0
    assert found.where("day = date(archived_at)").count() == done.rows
    assert lake.read(spark, path, queue=HOSTILE[1]).select("queue").distinct().collect() == [(HOSTILE[1],)]
    assert lake.read(spark, path, day="1999-12-31").columns == found.columns


def test_others_read_exactly_the_committed_files(spark: Any, tmp_path: Path, sqlite_url: str) -> None:
    path = tmp_path / "lake"
    for decode in (None, "infer"):
        fill(sqlite_url, HOSTILE)
        lake.export(spark, path, sqlite_url, decode=decode)
    orphan = Path(lake.files(path)[0]).with_name("00000001-0-orphan.parquet")
    orphan.write_bytes(Path(lake.files(path)[0]).read_bytes())
    ids = archived(sqlite_url)

    by_duckdb = duckdb.read_parquet(lake.files(path), union_by_name=True)
    by_polars = polars.scan_parquet(lake.files(path), missing_columns="insert")

    assert sorted(id_ for (id_,) in by_duckdb.select("id").fetchall()) == ids
    assert sorted(by_polars.select("id").collect()["id"]) == ids
    assert sorted(row.id for row in lake.read(spark, path).select("id").collect()) == ids
    total = by_duckdb.filter("queue = 'orders' AND state = 'COMPLETED'").aggregate("count(*)").fetchall()
    assert total == [(lake.read(spark, path).where("queue = 'orders' AND state = 'COMPLETED'").count(),)]
    done = lake.compact(spark, path)
    assert done.by == len(HOSTILE) and done.deleted == 1
    assert sorted(row.id for row in lake.read(spark, path).select("id").collect()) == ids


def test_the_commands(spark: Any, cli: Cli, postgres_url: str, tmp_path: Path) -> None:
    fill(postgres_url)
    where = ("--lake", str(tmp_path / "lake"), "--url", postgres_url)
    said = cli.ok("lake", "export", *where, "--json").json
    assert said["messages"] == len(rows(postgres_url, "archive")) and said["held"] == []
    files = cli.ok("lake", "files", "--lake", str(tmp_path / "lake")).out.splitlines()
    assert files == lake.files(tmp_path / "lake") and len(files) == said["files"]
    everything = {"looked_at": said["messages"], "missing": 0, "twice": 0}
    assert cli.ok("lake", "check", *where, "--json").json == everything
    with psycopg.connect(postgres_url) as connection:  # by hand, with a time of yesterday
        connection.execute(
            "INSERT INTO message_archive (id, queue, priority, due_at, payload, deliveries, attempts, created_at, "
            "state, archived_at) SELECT gen_random_uuid(), 'q', 50, 0, 'x', 1, 1, 0, 'COMPLETED', "
            "archived_at - 86400000000 FROM message_archive LIMIT 1"
        )
    missing = cli("lake", "check", *where)
    assert missing.code == 1 and " 1 missing, 0 twice" in missing.out and "export to a new lake" in missing.err
    told = cli.ok("lake", "export", *where).out
    assert told.startswith("0 messages in 0 files") and password(postgres_url) not in told
    assert "small files became" in cli.ok("lake", "compact", "--lake", str(tmp_path / "lake")).out


def test_on_a_schedule_until_told_to_stop(spark: Any, sqlite_url: str, tmp_path: Path) -> None:
    fill(sqlite_url, ["orders"])
    stop = threading.Event()
    steps: list[str] = []

    def tell(step: str, what: str) -> None:
        steps.append(step)
        if step == "compact":
            fill(sqlite_url, ["orders"])
        if len(steps) == 7:  # in the middle of the third round
            stop.set()

    lake.run(
        spark,
        tmp_path / "lake",
        sqlite_url,
        steps=["export", "purge", "compact"],
        every=timedelta(0),
        stop=stop,
        tell=tell,
    )
    assert steps == ["export", "purge", "compact"] * 2 + ["export"]
    assert sorted(row["id"] for row in lake_rows(tmp_path / "lake")) == archived(sqlite_url)


async def test_within_an_event_loop(spark: Any, mariadb_url: str, tmp_path: Path) -> None:
    """As in a notebook"""
    await asyncio.to_thread(fill, mariadb_url)
    lake.export(spark, tmp_path / "lake", mariadb_url)
    lake.run(spark, tmp_path / "lake", mariadb_url, rounds=1, report_to=tmp_path / "report")
    assert (tmp_path / "report" / "report.html").exists()
    ids = await asyncio.to_thread(archived, mariadb_url)
    assert sorted(row["id"] for row in lake_rows(tmp_path / "lake")) == ids


DRIVER = """
import sys
from millpond.cli import main
sys.argv = ["millpond", "lake", "run", "--every", "0s", "--step", "export", "--master", "local[2]", *sys.argv[1:]]
main()
"""


@pytest.mark.parametrize("end", [signal.SIGKILL, pytest.param(signal.SIGTERM, marks=pytest.mark.long)])
def test_a_driver_is_ended(end: signal.Signals, sqlite_url: str, tmp_path: Path) -> None:
    """In the middle of its exports; the next one goes on, in another process or in this one"""
    path = tmp_path / "lake"
    fill(sqlite_url, HOSTILE)
    arguments = ["--lake", str(path), "--url", sqlite_url]
    with subprocess.Popen(
        [sys.executable, "-c", DRIVER, *arguments], stdout=subprocess.PIPE, text=True, start_new_session=True
    ) as driver:
        assert driver.stdout is not None
        first = driver.stdout.readline()
        assert "export: 20 messages in 5 files" in first, first
        fill(sqlite_url, HOSTILE)
        if end is signal.SIGKILL:
            os.killpg(driver.pid, end)
        else:
            driver.send_signal(end)
        driver.communicate(timeout=60)
    assert driver.returncode == (-end if end is signal.SIGKILL else 0)
    export(path, sqlite_url)
    assert sorted(row["id"] for row in lake_rows(path)) == archived(sqlite_url)


CLUSTER = """
import json, sys
import millpond.spark
from millpond.spark import lake

master, settings, url, path = json.loads(sys.argv[1])
spark = millpond.spark.session("lake", master, settings)
first = lake.export(spark, path, url)
again = lake.export(spark, path, url)
found = sorted(row.id for row in lake.read(spark, path).select("id").collect())
print(json.dumps([first.rows, again.rows, found]))
spark.stop()
"""


@pytest.mark.long
def test_on_a_cluster(spark_cluster: SparkCluster, postgres_url: str, tmp_path: Path) -> None:
    fill(postgres_url)
    first, again, found = on_cluster(
        CLUSTER, spark_cluster.url, spark_cluster.settings, postgres_url, str(tmp_path / "lake")
    )
    assert found == archived(postgres_url)
    assert (first, again) == (len(found), 0)
