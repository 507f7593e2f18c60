"""Writes a report as files for other tools. Each file is replaced as a whole."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import IO

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv
import pyarrow.parquet

_CREATE = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW
_FORMULA = r"^[\s\x00]*[=+\-@|%\t\r\n]"
"""Spreadsheets skip leading white space before they look for a formula."""


def write_tables(tables: Mapping[str, pa.Table], folder: Path, *, csv: bool) -> list[Path]:
    folder.mkdir(parents=True, exist_ok=True)
    forms = {"parquet": pa.parquet.write_table} | ({"csv": _write_csv} if csv else {})
    return [
        _write(folder / f"{name}.{form}", partial(write, table))
        for name, table in tables.items()
        for form, write in forms.items()
    ]


def _write_csv(table: pa.Table, file: IO[bytes]) -> None:
    pa.csv.write_csv(without_formulas(table), file)


def without_formulas(table: pa.Table) -> pa.Table:
    """The table with an apostrophe before texts that a spreadsheet would evaluate. They come from publishers."""
    for at, field in enumerate(table.schema):
        if pa.types.is_string(field.type) or pa.types.is_large_string(field.type):
            column = table.column(at)
            marked = pc.binary_join_element_wise("'", column, "")
            table = table.set_column(at, field, pc.if_else(pc.match_substring_regex(column, _FORMULA), marked, column))
    return table


def write_text(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    return _write(path, lambda file: file.write(text.encode()))


def _write(path: Path, write: Callable[[IO[bytes]], object]) -> Path:
    unfinished = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with open(os.open(unfinished, _CREATE, 0o600), "wb") as file:
            if path.exists():  # its owner may have opened it to others
                os.fchmod(file.fileno(), path.stat().st_mode & 0o777)
            write(file)
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)
    return path
