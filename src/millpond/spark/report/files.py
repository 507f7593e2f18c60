"""A report as files for other tools: each is there whole, or as it was before."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import IO

import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet


def write_tables(tables: Mapping[str, pa.Table], folder: Path, *, csv: bool) -> list[Path]:
    folder.mkdir(parents=True, exist_ok=True)
    forms = {"parquet": pa.parquet.write_table} | ({"csv": pa.csv.write_csv} if csv else {})
    return [
        _write(folder / f"{name}.{form}", partial(write, table))
        for name, table in tables.items()
        for form, write in forms.items()
    ]


def write_text(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    return _write(path, lambda file: file.write(text.encode()))


def _write(path: Path, write: Callable[[IO[bytes]], object]) -> Path:
    unfinished = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with unfinished.open("wb") as file:
            write(file)
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)
    return path
