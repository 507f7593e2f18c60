"""Spark's Python daemon, with everything imported that its workers need.

Spark starts a worker for each step of a query, and each would import these anew: half a second of processor time.
"""

import importlib
import pkgutil

import pyarrow  # noqa: F401
import pyspark.daemon
import pyspark.sql.worker
import pyspark.worker

import millpond.spark

for package in (pyspark.sql.worker, millpond.spark):
    for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
        if "cli" not in module.name:
            importlib.import_module(module.name)

if __name__ == "__main__":
    pyspark.daemon.manager()
