"""Spark in and out of the queue: `spark.read`, `readStream`, `write` and `writeStream` with `format("millpond")`.

See docs/reference/spark.md. Nothing of Spark is imported before it is used.
"""

from __future__ import annotations

from millpond.spark.handlers import run
from millpond.spark.settle import Recording, settle
from millpond.spark.start import register, session

__all__ = ["Recording", "register", "run", "session", "settle"]
