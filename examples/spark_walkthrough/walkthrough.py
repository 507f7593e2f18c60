# %% [markdown]
# # Spark and a queue
# Publish, read a batch, stream, settle, and write back. It needs only Java 17 and `millpond[spark]`.

# %%
import asyncio
import os
import tempfile

from pyspark.sql import DataFrame
from pyspark.sql import functions as f

import millpond
import millpond.spark

folder = tempfile.mkdtemp(prefix="millpond-walkthrough-")
url = os.environ.get("MILLPOND_URL") or f"sqlite:///{folder}/pond.db"
spark = millpond.spark.session("walkthrough", "local[2]")

# %% [markdown]
# ## Publish
# The same call as in an application. `migrate=True` creates the tables.


# %%
async def publish() -> None:
    store = await millpond.connect(url, migrate=True)
    skus = ("teapot", "cup", "anvil")
    bodies = [b'{"sku": "%s", "quantity": %d}' % (skus[n % 3].encode(), n % 5) for n in range(30)]
    await store.publish([millpond.Message(queue="orders", payload=body, key=f"customer-{body[-2]}") for body in bodies])
    await store.close()


# A notebook has an event loop already: there, `await publish()`.
asyncio.run(publish())

# %% [markdown]
# ## Read a batch
# Read the waiting messages without claiming them. The database applies the filter.

# %%
waiting = spark.read.format("millpond").options(url=url, columns="queue,state,payload,created_at").load()
order = f.from_json(f.col("payload").cast("string"), "sku string, quantity int").alias("order")
waiting.where("queue = 'orders'").select(order).groupBy("order.sku").agg(f.sum("order.quantity")).show()

# %% [markdown]
# ## Stream, and settle each message
# The stream claims messages, fifteen at a time. The job decides about each: orders with quantity 0 are rejected, the
# rest are acknowledged. Decisions take effect when Spark has committed the batch; a crash repeats the batch unchanged.

# %%
stream = (
    spark.readStream.format("millpond")
    .options(url=url, queue="orders", stream="walkthrough", maxMessagesPerTrigger="15", ackMode="manual")
    .load()
)


def handle(batch: DataFrame, number: int) -> None:
    orders = batch.select("id", "key", order).select("id", "key", "order.*").cache()
    # Write to a queue in one transaction. Its name, `txn`, keeps a repeated batch from being published again.
    orders.where("quantity > 0").select("key", "sku", "quantity").write.format("millpond").mode("append").options(
        url=url, queue="to-be-shipped", txn=f"walkthrough-{number}"
    ).save()
    outcomes = orders.selectExpr(
        "id", "CASE WHEN quantity > 0 THEN 'ack' ELSE 'reject' END AS outcome", "'nothing ordered' AS reason"
    )
    print(f"batch {number}:", millpond.spark.settle(outcomes, stream="walkthrough", url=url).recorded, "decided")
    orders.unpersist()


query = (
    stream.writeStream.foreachBatch(handle)
    .option("checkpointLocation", f"{folder}/checkpoint")
    .trigger(availableNow=True)
    .start()
)
query.awaitTermination()

# %% [markdown]
# ## Read the results
# Settled messages are in the archive; failed ones have a reason.

# %%
archive = spark.read.format("millpond").options(url=url, table="archive").load()
archive.groupBy("queue", "state", "reason").count().show(truncate=False)

# %% [markdown]
# ## The sink of a stream
# From queue to queue without Python code for each batch: the stream below moves messages from `to-be-shipped` to the
# queue of the warehouse. Restarted with its checkpoint, it continues where it stopped.

# %%
shipping = spark.readStream.format("millpond").options(url=url, queue="to-be-shipped", stream="shipping").load()
shipped = (
    shipping.select("key", "payload")
    .writeStream.format("millpond")
    .options(url=url, queue="warehouse", checkpointLocation=f"{folder}/shipping")
    .trigger(availableNow=True)
    .start()
)
shipped.awaitTermination()
now = spark.read.format("millpond").options(url=url, columns="queue,state").load()
now.groupBy("queue", "state").count().show()
