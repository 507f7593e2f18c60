"""A lake in an object store: the same guarantees, with one set of storage options for log and files."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any
from uuid import uuid4

import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable

from millpond.spark import lake
from millpond.spark.lake.compact import compact
from millpond.spark.lake.files import Progress
from millpond.spark.lake.storage import storage_of
from millpond.spark.lake.table import Lake, LakeChanged
from millpond.spark.lake.writers import file_schema
from servers import ObjectStore
from tests.spark.lake.here import Here, export, exporter
from tests.spark.lake.readers import by_deltalake, by_polars
from tests.spark.lake.test_export import archived
from tests.spark.lake.test_purge import purge
from tests.spark.lake.test_table import file
from tests.spark.ponds import HOSTILE, fill

pytestmark = [pytest.mark.server, pytest.mark.usefixtures("soon")]


@pytest.fixture(scope="module")
def store() -> Iterator[ObjectStore]:
    with ObjectStore() as server:
        server.create_bucket("lakes")
        yield server


@pytest.fixture
def url(store: ObjectStore) -> str:
    return f"s3://lakes/{uuid4().hex}/lake"


def rows(url: str, options: dict[str, str]) -> list[str]:
    found = lake.files(url, storage_options=options)
    storage = storage_of(url, options)
    sources = [storage.source(one.removeprefix(f"{url}/")) for one in found]
    return sorted(id_ for source in sources for id_ in pq.ParquetFile(source).read(["id"]).column("id").to_pylist())


def test_export_read_compact_and_purge(url: str, store: ObjectStore, sqlite_url: str) -> None:
    options = {"storage_options": store.options}
    for decode in (None, "infer", None):
        fill(sqlite_url, HOSTILE)
        export(url, sqlite_url, decode=decode, **options)  # type: ignore[arg-type]
    ids = archived(sqlite_url)
    before = lake.files(url, **options)
    for _ in range(2):
        assert rows(url, store.options) == ids
        assert by_polars(url, **options) == by_deltalake(url, **options) == ids
        done = compact(Here(), url, **options)  # type: ignore[arg-type]
    assert len(lake.files(url, **options)) == 1 and before[0].startswith(url)
    done = compact(Here(), url, keep=timedelta(0), **options)  # type: ignore[arg-type]
    assert done.deleted == len(before) and rows(url, store.options) == ids
    assert purge(sqlite_url) == len(ids) and archived(sqlite_url) == []
    fill(sqlite_url, ["orders"])
    assert export(url, sqlite_url, **options).rows == 4  # type: ignore[arg-type]


def test_commits_are_conditional(url: str, store: ObjectStore) -> None:
    """One of the writers that commit the same version at the same time wins; an export of the same shard plans anew."""
    storage = storage_of(url, store.options)
    Lake.create(storage, file_schema(None))
    won, lost = [], []

    def write(number: int, handle: Lake) -> None:
        try:
            handle.export([file(str(number))], {0: Progress(None, 7 + number, 1)})
            won.append(number)
        except LakeChanged:
            lost.append(number)

    writers = [threading.Thread(target=write, args=(n, Lake.open(storage))) for n in range(4)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    assert (len(won), len(lost)) == (1, 3)
    assert Lake.open(storage).until(0) == 7 + won[0]
    assert len(lake.files(url, storage_options=store.options)) == 1


@pytest.mark.slow
def test_exports_and_compactions_at_once(url: str, store: ObjectStore, tmp_path: Path) -> None:
    """Two shards and a compaction, each in its own thread, against one log."""
    options = {"storage_options": store.options}
    databases = [f"sqlite:///{tmp_path / name}.db" for name in ("a", "b")]
    for database in databases:
        fill(database, ["orders"])
    export(url, " ".join(databases), **options)  # type: ignore[arg-type]
    errors: list[BaseException] = []

    def attempt(work: Callable[[], Any]) -> None:
        try:
            for _ in range(3):
                work()
        except BaseException as e:
            errors.append(e)

    def export_one() -> None:
        for database in databases:
            fill(database, ["orders"])
        one = exporter(url, " ".join(databases), **options)  # type: ignore[arg-type]
        one.export()
        one.close()

    works = (export_one, lambda: compact(Here(), url, **options))  # type: ignore[arg-type]
    threads = [threading.Thread(target=attempt, args=(work,)) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    wanted = sorted(id_ for database in databases for id_ in archived(database))
    assert rows(url, store.options) == by_deltalake(url, **options) == wanted


def test_no_secret_is_shown(url: str, store: ObjectStore) -> None:
    assert "secret" not in repr(storage_of(url, store.options))


@pytest.mark.slow
def test_spark_reads_it_without_a_jar(spark: Any, url: str, store: ObjectStore, sqlite_url: str) -> None:
    options = {"storage_options": store.options}
    fill(sqlite_url, HOSTILE)
    done = lake.export(spark, url, sqlite_url, decode="infer", margin=0, **options)
    frame = lake.read(spark, url, **options)
    assert sorted(row.id for row in frame.select("id").collect()) == archived(sqlite_url)
    assert lake.read(spark, url, queue="orders", **options).count() == 4
    assert lake.check(spark, url, sqlite_url, **options).missing == 0
    assert done.rows == DeltaTable(url, **options).to_pyarrow_dataset().count_rows()
    assert not set(os.environ) & {"AWS_SECRET_ACCESS_KEY"}, "options, not the environment, were used"
