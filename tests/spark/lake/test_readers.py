"""DuckDB, Polars and deltalake see each message once, whatever happens to the lake meanwhile. No Spark is needed."""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import pytest

from millpond.spark.lake.compact import compact
from tests.spark.lake.here import Here, export
from tests.spark.lake.readers import READERS, by_duckdb
from tests.spark.lake.test_export import archived
from tests.spark.ponds import fill

pytestmark = pytest.mark.usefixtures("soon")
ROUNDS = 6


@pytest.mark.parametrize(
    "read", [pytest.param(one, marks=() if one is by_duckdb else pytest.mark.slow) for one in READERS]
)
def test_during_exports_and_compactions(read: Callable[..., list[str]], sqlite_url: str, tmp_path: Path) -> None:
    read_meanwhile([read], sqlite_url, tmp_path / "lake")


def read_meanwhile(reads: list[Callable[..., list[str]]], sqlite_url: str, path: Path) -> None:
    """Read in turn, by each way, while exports and compactions run."""
    fill(sqlite_url, ["orders"])
    export(path, sqlite_url)
    exported, errors = [set(archived(sqlite_url))], []
    done = threading.Event()

    def write() -> None:
        try:
            for n in range(ROUNDS):
                fill(sqlite_url, ["orders", "other"])
                settled = set(archived(sqlite_url))
                export(path, sqlite_url, decode="infer")
                exported.append(settled)
                if n % 2:
                    compact(Here(), path, keep=timedelta(hours=1))  # type: ignore[arg-type]
        except BaseException as e:
            errors.append(e)
        finally:
            done.set()

    writer = threading.Thread(target=write)
    writer.start()
    looked = 0
    while not done.is_set() or looked < len(reads):
        least = exported[-1]
        found = reads[looked % len(reads)](path)
        assert len(found) == len(set(found)), "a message twice"
        assert least <= set(found), "a message is missing that was exported before"
        looked += 1
    writer.join()
    assert not errors
    for read in reads:
        assert read(path) == archived(sqlite_url)
