"""Over Spark Connect: the server plans and runs, the client only asks."""

from __future__ import annotations

from servers import SparkConnect
from tests.spark.ponds import fill, rows
from tests.spark.test_cluster import on_cluster

READ = """
import json, sys
from pyspark.sql import SparkSession
import millpond.spark

remote, url = json.loads(sys.argv[1])
spark = millpond.spark.register(SparkSession.builder.remote(remote).getOrCreate())
found = spark.read.format("millpond").options(url=url, table="archive").load().where("state = 'COMPLETED'")
print(json.dumps([type(spark).__module__, sorted(row.id for row in found.select("id").collect())]))
spark.stop()
"""


def test_a_batch_over_connect(sqlite_url: str) -> None:
    fill(sqlite_url)
    with SparkConnect() as server:
        module, found = on_cluster(READ, server.url, sqlite_url)
    assert "connect" in module
    assert found == sorted(str(id_) for id_, row in rows(sqlite_url, "archive").items() if row.state == "COMPLETED")
