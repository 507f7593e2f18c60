"""Lets Spark find the source: it imports every top-level package whose name begins with `pyspark_`."""

from millpond.spark.source import MillpondSource as DefaultSource

__all__ = ["DefaultSource"]
