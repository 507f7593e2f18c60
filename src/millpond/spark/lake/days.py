"""Counts the messages of a lake file by file, without Spark and Java: for the history of the server."""

from __future__ import annotations

import os
from collections.abc import Mapping
from datetime import UTC, date, datetime

from millpond.errors import LakeError, MissingDriver, NoLake
from millpond.spark.lake.storage import storage_of
from millpond.spark.lake.table import Chosen, Lake

_COLUMNS = ["queue", "state"]


class CountedLake:
    """A lake whose files are listed by day and counted by queue and state."""

    def __init__(self, path: str | os.PathLike[str], storage_options: Mapping[str, str] | None = None) -> None:
        try:
            import deltalake  # noqa: F401  # before the first request
            import pyarrow.parquet  # noqa: F401
        except ModuleNotFoundError as e:
            raise MissingDriver(
                f'a lake needs the package {e.name}; install it with: pip install "millpond[spark]"'
            ) from None
        self._storage = storage_of(path, storage_options)

    def days(self, since: date) -> dict[str, date]:
        """File -> day of its messages, for the files of this day and later ones; none while there is no lake."""
        chosen = Chosen(since=datetime(since.year, since.month, since.day, tzinfo=UTC))
        try:
            paths = Lake.open(self._storage).paths(chosen)
        except NoLake:
            return {}
        days = {path: path.partition("/")[0].removeprefix("day=") for path in paths if path.startswith("day=")}
        return {path: date.fromisoformat(day) for path, day in days.items()}

    def count(self, file: str) -> dict[tuple[str, str], int]:
        """(queue, state) -> number of messages in a file. Only these two columns are read."""
        import pyarrow as pa
        import pyarrow.parquet as pq

        found: dict[tuple[str, str], int] = {}
        try:
            with pq.ParquetFile(self._storage.source(file)) as source:
                for number in range(source.num_row_groups):
                    table = source.read_row_group(number, columns=_COLUMNS, use_threads=False)
                    for row in table.group_by(_COLUMNS).aggregate([([], "count_all")]).to_pylist():
                        key = row["queue"], row["state"]
                        found[key] = found.get(key, 0) + row["count_all"]
        except (OSError, pa.ArrowException) as e:
            raise LakeError(f"the file {file} of the lake {self._storage.root} could not be read: {e}") from None
        return found
