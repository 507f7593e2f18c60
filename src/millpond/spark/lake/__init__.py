"""The lake: the archive as Parquet files, written by Spark, with a manifest that says which files there are.

See docs/how-to/lake.md. Nothing of Spark is imported before it is used, so that people who read a lake with other
tools need neither Spark nor Java.
"""

from __future__ import annotations

from millpond.spark.lake.read import files, read

__all__ = ["files", "read"]
