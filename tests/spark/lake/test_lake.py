"""The lake with a real Spark: executors write; Spark, DuckDB and Polars read exactly the committed files."""

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

import psycopg
import pytest

from millpond.spark import lake
from millpond.spark.lake.storage import storage_of
from millpond.spark.lake.table import Lake
from millpond.transports.database.exports.exports import DatabaseExports
from millpond.transports.database.mysql.dialect import MysqlDialect
from millpond.transports.database.postgres.dialect import PostgresDialect
from servers import SparkCluster
from tests.cli.conftest import Cli, cli
from tests.spark.lake.here import export, lake_rows
from tests.spark.lake.readers import READERS
from tests.spark.lake.test_export import settle
from tests.spark.lake.test_purge import Dead, dead
from tests.spark.lake.test_readers import read_meanwhile
from tests.spark.ponds import HOSTILE, fill, password, rows
from tests.spark.test_cluster import on_cluster

__all__ = ["cli"]

READ = sys.modules["millpond.spark.lake.read"]  # the function of the same name hides the module


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is settled meanwhile."""
    monkeypatch.setattr(sys.modules[lake.Exported.__module__], "MARGIN", 0)
    monkeypatch.setattr(MysqlDialect, "grace", 0.0)
    monkeypatch.setattr(PostgresDialect, "grace", 0.0)


def archived(url: str) -> list[str]:
    return sorted(str(id_) for id_ in rows(url, "archive"))


@pytest.mark.slow_on_servers
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


def test_every_reader_counts_the_same_rows(spark: Any, tmp_path: Path, sqlite_url: str) -> None:
    """After exports with and without decoded bodies, beside an orphan of a killed task, and after a compaction."""
    path = tmp_path / "lake"
    for decode in (None, "sku bigint, SKU bigint", "infer"):
        fill(sqlite_url, HOSTILE)
        settle_bodies(sqlite_url)
        lake.export(spark, path, sqlite_url, decode=decode)
    orphan = Path(lake.files(path)[0]).with_name("0123.parquet")
    orphan.write_bytes(Path(lake.files(path)[0]).read_bytes())
    ids = archived(sqlite_url)
    some = "queue = 'orders' AND state = 'COMPLETED'"
    for _ in range(2):
        frame = lake.read(spark, path)
        assert sorted(row.id for row in frame.select("id").collect()) == ids
        chosen = sorted(row.id for row in frame.where(some).select("id").collect())
        for read in READERS:
            assert (read(path), read(path, some)) == (ids, chosen), read.__name__
        assert frame.where("unreadable IS NOT NULL AND queue = 'bodies'").count() == 2 * 4
        counted = {row.queue: row.messages for row in lake.unreadable(spark, path).collect()}
        assert counted["bodies"] == 2 * 4
        assert lake.check(spark, path, sqlite_url).unreadable == sum(counted.values())
        lake.compact(spark, path)
    assert frame.select("body.sku", "unreadable").where("payload = '{\"SKU\":3}'").distinct().collect() == [
        (None, None),
        (3, None),
    ]
    # The same rows by Python tasks, as for an object store without a jar.
    schema, body = frame.schema, Lake.open(storage_of(path)).body
    relative = [str(Path(file).relative_to(path)) for file in lake.files(path)]
    by_tasks = READ._by_executors(spark, storage_of(path), relative, body, schema)
    assert by_tasks.schema == schema and by_tasks.exceptAll(frame).count() == frame.exceptAll(by_tasks).count() == 0


@pytest.mark.slow
def test_all_readers_during_exports_and_compactions_and_after_a_kill(
    spark: Any, sqlite_url: str, tmp_path: Path
) -> None:
    """Spark's too. The killed export has committed, and did not record it."""
    path = tmp_path / "lake"

    def by_spark(path: Path) -> list[str]:
        return sorted(row.id for row in lake.read(spark, path).select("id").collect())

    read_meanwhile([by_spark, *READERS], sqlite_url, path)
    fill(sqlite_url, ["orders"])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(DatabaseExports, "advance", dead)
        with pytest.raises(Dead):
            export(path, sqlite_url)
    for read in (by_spark, *READERS):
        assert read(path) == archived(sqlite_url), read.__name__


def settle_bodies(url: str) -> None:
    bodies = [{"sku": 1}, {"SKU": 3}, {"sku": "seven"}, {"sku": 2**70, "": 1, "a.b": 2, "`": 3}, [1], "text"]
    asyncio.run(settle(url, "bodies", bodies))


def test_the_commands(spark: Any, cli: Cli, postgres_url: str, tmp_path: Path) -> None:
    fill(postgres_url)
    where = ("--lake", str(tmp_path / "lake"), "--url", postgres_url)
    said = cli.ok("lake", "export", *where, "--margin", "0s", "--json").json
    assert said["messages"] == len(rows(postgres_url, "archive")) and said["held"] == []
    files = cli.ok("lake", "files", "--lake", str(tmp_path / "lake")).out.splitlines()
    assert files == lake.files(tmp_path / "lake") and len(files) == said["files"]
    everything = {"checked": said["messages"], "missing": 0, "duplicates": 0, "unreadable": 0}
    assert cli.ok("lake", "check", *where, "--json").json == everything
    with psycopg.connect(postgres_url) as connection:  # by hand, with a time that was exported before
        connection.execute(
            "INSERT INTO millpond_archive (id, queue, priority, due_at, payload, deliveries, attempts, created_at, "
            "state, archived_at) SELECT gen_random_uuid(), 'q', 50, 0, 'x', 1, 1, 0, 'COMPLETED', "
            "archived_at FROM millpond_archive LIMIT 1"
        )
    missing = cli("lake", "check", *where)
    assert missing.code == 1 and " 1 missing, 0 duplicates" in missing.out and "check --repair" in missing.err
    told = cli.ok("lake", "export", *where, "--margin", "0s").out
    assert told.startswith("0 messages in 0 files") and password(postgres_url) not in told
    # Purge refuses the range of the missing message until it is repaired, and the next export takes the message.
    assert "has 21 messages" in cli.fails(2, "lake", "purge", "--older-than", "0s", "--url", postgres_url)
    assert " 1 missing" in cli.ok("lake", "check", *where, "--repair").out
    assert cli.ok("lake", "export", *where, "--margin", "0s", "--json").json["messages"] == 1
    assert cli.ok("lake", "check", *where, "--json").json == {**everything, "checked": 21}
    assert cli.ok("lake", "purge", "--older-than", "0s", "--url", postgres_url, "--json").json == {"purged": 21}
    assert "small files became" in cli.ok("lake", "compact", "--lake", str(tmp_path / "lake")).out


def test_on_a_schedule_until_told_to_stop(spark: Any, sqlite_url: str, tmp_path: Path) -> None:
    fill(sqlite_url, ["orders"])
    stop = threading.Event()
    steps: list[str] = []

    def on_step(step: str, what: str) -> None:
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
        on_step=on_step,
    )
    assert steps == ["export", "purge", "compact"] * 2 + ["export"]
    assert sorted(row["id"] for row in lake_rows(tmp_path / "lake")) == archived(sqlite_url)


async def test_within_an_event_loop(spark: Any, mariadb_url: str, tmp_path: Path) -> None:
    """As in a notebook."""
    await asyncio.to_thread(fill, mariadb_url)
    lake.export(spark, tmp_path / "lake", mariadb_url)
    lake.run(spark, tmp_path / "lake", mariadb_url, rounds=1, report_to=tmp_path / "report")
    assert (tmp_path / "report" / "report.html").exists()
    ids = await asyncio.to_thread(archived, mariadb_url)
    assert sorted(row["id"] for row in lake_rows(tmp_path / "lake")) == ids


DRIVER = """
import sys
from millpond.cli import main
command = "millpond lake run --every 0s --step export --margin 0s --master local[2]"
sys.argv = [*command.split(), *sys.argv[1:]]
main()
"""


@pytest.mark.java
@pytest.mark.slow
@pytest.mark.parametrize("end", [signal.SIGKILL, pytest.param(signal.SIGTERM, marks=pytest.mark.long)])
def test_a_driver_is_ended(end: signal.Signals, sqlite_url: str, tmp_path: Path) -> None:
    """In the middle of its exports; the next run continues, in another process or in this one."""
    path = tmp_path / "lake"
    fill(sqlite_url, HOSTILE)
    arguments = ["--lake", str(path), "--url", sqlite_url]
    with subprocess.Popen(
        [sys.executable, "-c", DRIVER, *arguments], stdout=subprocess.PIPE, text=True, start_new_session=True
    ) as driver:
        assert driver.stdout is not None
        first = driver.stdout.readline()
        assert "export: 20 messages in" in first, first
        fill(sqlite_url, HOSTILE)
        if end is signal.SIGKILL:
            os.killpg(driver.pid, end)
        else:
            driver.send_signal(end)
        driver.communicate(timeout=60)
    assert driver.returncode == (-end if end is signal.SIGKILL else 0)
    export(path, sqlite_url)
    assert sorted(row["id"] for row in lake_rows(path)) == archived(sqlite_url)
    for read in READERS:
        assert read(path) == archived(sqlite_url), read.__name__


CLUSTER = """
import json, sys
import millpond.spark
from millpond.spark import lake

master, settings, url, path = json.loads(sys.argv[1])
spark = millpond.spark.session("lake", master, settings)
first = lake.export(spark, path, url, margin=0)
again = lake.export(spark, path, url, margin=0)
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
