"""The lake: the archive as Parquet files, written by Spark, with a manifest that says which files there are.

See docs/how-to/lake.md. Nothing of Spark is imported before it is used, so that people who read a lake with other
tools need neither Spark nor Java.
"""

from __future__ import annotations

from millpond.spark.lake.check import Checked, check
from millpond.spark.lake.compact import Compacted, compact
from millpond.spark.lake.export import Exported, export
from millpond.spark.lake.read import files, read
from millpond.spark.lake.schedule import run

__all__ = ["Checked", "Compacted", "Exported", "check", "compact", "export", "files", "read", "run"]
