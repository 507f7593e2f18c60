"""A report as files for other tools: each is there whole, or as it was before."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import IO

import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet


def write_tables(tables: Mapping[str, pa.Table], folder: Path, *, csv: bool) -> list[Path]:
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for name, table in tables.items():
        paths.append(_write(folder / f"{name}.parquet", lambda file, t=table: pa.parquet.write_table(t, file)))
        if csv:
            paths.append(_write(folder / f"{name}.csv", lambda file, t=table: pa.csv.write_csv(t, file)))
    return paths


def write_text(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    return _write(path, lambda file: file.write(text.encode()))


def _write(path: Path, write: Callable[[IO[bytes]], object]) -> Path:
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with partial.open("wb") as file:
            write(file)
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
    return path
