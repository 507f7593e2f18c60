"""Streaming reads: `spark.readStream.format("millpond")`."""
