"""Spark in and out of the queue: `spark.read`, `readStream`, `write` and `writeStream` with `format("millpond")`.

See docs/reference/spark.md. PySpark is imported only when it is used.
"""

from __future__ import annotations

from millpond.spark.handlers.run import run
from millpond.spark.sessions import register, session
from millpond.spark.settle import Recording, settle
from millpond.spark.txn_option import txn

__all__ = ["Recording", "register", "run", "session", "settle", "txn"]
