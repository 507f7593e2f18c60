"""On a real cluster: executors in processes of their own, which import the package and connect by themselves."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from servers import SparkCluster
from tests.spark.ponds import fill, rows

READ = """
import json, sys
import millpond.spark

master, settings, url, file = json.loads(sys.argv[1])
spark = millpond.spark.session("cluster", master, settings)
read = spark.read.format("millpond").options(url=url, table="archive", minPartitions="4")
found = read.load().where("state = 'COMPLETED'").select("id").collect()
try:
    spark.read.format("millpond").options(url=file).load().collect()
    refused = ""
except Exception as e:
    refused = str(e)
print(json.dumps([sorted(row.id for row in found), refused]))
spark.stop()
"""


def on_cluster(script: str, *arguments: Any, timeout: float = 150) -> Any:
    """Run a script in a process of its own; what it prints last is its answer, as JSON."""
    done = subprocess.run(
        [sys.executable, "-c", script, json.dumps(arguments)], capture_output=True, text=True, timeout=timeout
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_executors_read_the_database_and_no_file(
    spark_cluster: SparkCluster, postgres_url: str, tmp_path: Path
) -> None:
    fill(postgres_url)
    file = f"sqlite:///{tmp_path / 'pond.db'}"
    fill(file, ["orders"])
    found, refused = on_cluster(READ, spark_cluster.url, spark_cluster.settings, postgres_url, file)
    assert found == sorted(str(id_) for id_, row in rows(postgres_url, "archive").items() if row.state == "COMPLETED")
    assert "is a file of one machine" in refused
