"""Other readers of a lake: each returns the ids of all messages, or of those that a condition selects."""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import duckdb
import polars
import pyarrow as pa
from deltalake import DeltaTable, QueryBuilder
from duckdb_extensions import import_extension


@functools.cache
def connection() -> duckdb.DuckDBPyConnection:
    """DuckDB with its extension for Delta tables, from a package: tests have no network."""
    made = duckdb.connect(config={"extension_directory": tempfile.mkdtemp(prefix="millpond-duckdb-")})
    import_extension("delta", con=made)
    made.sql("LOAD delta")
    return made


def by_duckdb(path: Path | str, where: str = "true") -> list[str]:
    rows = connection().cursor().sql(f"SELECT id FROM delta_scan('{path}') WHERE {where}").fetchall()
    return sorted(id_ for (id_,) in rows)


def by_polars(path: Path | str, where: str = "true", **options: Any) -> list[str]:
    frame = polars.scan_delta(str(path), **options)
    return sorted(polars.SQLContext(lake=frame).execute(f"SELECT id FROM lake WHERE {where}").collect()["id"])


def by_deltalake(path: Path | str, where: str = "true", **options: Any) -> list[str]:
    table = DeltaTable(path, **options)
    found = QueryBuilder().register("lake", table).execute(f"SELECT id FROM lake WHERE {where}")
    return sorted(pa.table(found).column("id").to_pylist())


READERS: list[Callable[..., list[str]]] = [by_duckdb, by_polars, by_deltalake]
