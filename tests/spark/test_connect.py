"""Over Spark Connect: the server plans and runs, the client only sends requests."""

from __future__ import annotations

from pathlib import Path

import pytest

from servers import SparkConnect
from tests.spark.ponds import fill, rows
from tests.spark.test_cluster import on_cluster

JOB = """
import json, sys
from pyspark.sql import SparkSession
import millpond.spark

remote, url, folder = json.loads(sys.argv[1])
spark = millpond.spark.register(SparkSession.builder.remote(remote).getOrCreate())
found = spark.read.format("millpond").options(url=url, table="archive").load().where("state = 'COMPLETED'")
ids = sorted(row.id for row in found.select("id").collect())

numbers = spark.range(0, 30, 1, 2).selectExpr("cast(id as string) as payload")
for _ in range(2):
    numbers.write.format("millpond").mode("append").options(url=url, queue="in", txn="numbers").save()

def stream(name, queue, **options):
    options = {"url": url, "queue": queue, "stream": name, "maxMessagesPerTrigger": "20", **options}
    return spark.readStream.format("millpond").options(**options).load()

def run(writer, name):
    query = writer.option("checkpointLocation", f"{folder}/{name}").trigger(availableNow=True).start()
    query.awaitTermination()
    assert query.exception() is None

run(stream("on", "in").select("payload").writeStream.format("millpond").options(url=url, queue="out"), "on")

def reject(frame, number):
    import millpond.spark
    millpond.spark.settle(frame.selectExpr("id", "'reject' as outcome", "'no' as reason"), stream="judge", url=url)

run(stream("judge", "out", ackMode="manual").writeStream.foreachBatch(reject), "judge")

from millpond.spark import lake
exported = lake.export(spark, f"{folder}/lake", url, margin=0, decode="infer").rows
in_lake = sorted(row.id for row in lake.read(spark, f"{folder}/lake").select("id").collect())
lake.compact(spark, f"{folder}/lake")

def publish(batch, number):
    import millpond.spark
    name = millpond.spark.txn(batch, number, checkpoint=f"{folder}/named")
    for _ in range(2):
        batch.select("payload").write.format("millpond").mode("append").options(url=url, queue="named", txn=name).save()

spark.range(0, 5).selectExpr("cast(id as string) as payload").write.json(f"{folder}/in")
run(spark.readStream.schema("payload string").json(f"{folder}/in").writeStream.foreachBatch(publish), "named")

try:
    millpond.spark.run(millpond.Millpond(url), spark)
    refused = ""
except millpond.Unsupported as e:
    refused = str(e)
print(json.dumps([type(spark).__module__, ids, refused, exported, in_lake]))
spark.stop()
"""


@pytest.mark.java
@pytest.mark.long
def test_batches_streams_and_outcomes_over_connect(sqlite_url: str, tmp_path: Path) -> None:
    fill(sqlite_url)
    before = rows(sqlite_url, "archive")
    with SparkConnect() as server:
        module, found, refused, exported, in_lake = on_cluster(
            JOB, server.url, sqlite_url, str(tmp_path / "checkpoints")
        )
    assert "connect" in module
    assert "a client of Spark Connect" in refused
    assert found == sorted(str(id_) for id_, row in before.items() if row.state == "COMPLETED")
    archived = rows(sqlite_url, "archive").values()
    assert in_lake == sorted(str(id_) for id_ in rows(sqlite_url, "archive")) and exported == len(in_lake)
    assert sum(row.queue == "named" for row in rows(sqlite_url, "messages").values()) == 5
    numbers = sorted(str(n).encode() for n in range(30))
    for queue, state, reason in (("in", "COMPLETED", None), ("out", "FAILED", "no")):
        done = [row for row in archived if row.queue == queue]
        assert sorted(row.payload for row in done) == numbers
        assert {(row.state, row.reason) for row in done} == {(state, reason)}
