"""The lake: the archive as a Delta table, whose Parquet files Spark's executors write.

See docs/how-to/lake.md. PySpark is imported only when it is used: reading a lake with other tools needs neither Spark
nor Java.
"""

from __future__ import annotations

from millpond.spark.lake.compact import Compacted, compact
from millpond.spark.lake.export import Exported, export
from millpond.spark.lake.migrate import Migrated, migrate
from millpond.spark.lake.read import files, read, unreadable
from millpond.spark.lake.schedule import run
from millpond.spark.lake.verify import Checked, check

__all__ = [
    "Checked",
    "Compacted",
    "Exported",
    "Migrated",
    "check",
    "compact",
    "export",
    "files",
    "migrate",
    "read",
    "run",
    "unreadable",
]
