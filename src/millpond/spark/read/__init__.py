"""Batch reads: `spark.read.format("millpond")`."""
