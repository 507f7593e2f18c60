"""Read orders from one queue, publish priced orders to another: `python -m examples.enrich.job CHECKPOINT`."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING

from pyspark.sql import functions as f

import millpond.spark

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming.query import StreamingQuery

ORDER = "sku string, quantity int"


def prices(spark: SparkSession) -> DataFrame:
    """The price of each sku; in a real shop, a table of the lake."""
    return spark.createDataFrame([("teapot", 12.5), ("cup", 4.0)], "sku string, price double")


def priced(orders: DataFrame, prices: DataFrame) -> DataFrame:
    """One message per order, for the queue `priced` or `unreadable`."""
    read = orders.withColumn("order", f.from_json(f.col("payload").cast("string"), ORDER))
    known = read.join(f.broadcast(prices), read["order.sku"] == prices["sku"], "left")
    body = f.struct("order.sku", "order.quantity", (f.col("price") * f.col("order.quantity")).alias("total"))
    readable = f.col("price").isNotNull() & f.col("order.quantity").isNotNull()
    return known.select(
        f.when(readable, "priced").otherwise("unreadable").alias("queue"),
        "key",
        "priority",
        "headers",
        f.when(readable, f.to_json(body).cast("binary")).otherwise(f.col("payload")).alias("payload"),
    )


def start(spark: SparkSession, url: str, checkpoint: str, *, once: bool = False) -> StreamingQuery:
    """Price orders as they arrive; with `once`, price the waiting ones and end."""
    orders = spark.readStream.format("millpond").options(url=url, queue="orders", stream="enrich").load()
    writer = (
        priced(orders, prices(spark)).writeStream.format("millpond").options(url=url, checkpointLocation=checkpoint)
    )
    return (writer.trigger(availableNow=True) if once else writer.trigger(processingTime="1 second")).start()


if __name__ == "__main__":
    start(millpond.spark.session("enrich"), os.environ["MILLPOND_URL"], sys.argv[1]).awaitTermination()
