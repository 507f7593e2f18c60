"""Names for the writes of `foreachBatch`: the same when Spark repeats a batch, another one with a new checkpoint."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from millpond.errors import Unsupported

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

_QUERY = "sql.streaming.queryId"


def txn(batch: DataFrame, batch_id: int, name: str = "", *, checkpoint: str | None = None) -> str:
    """The option `txn` for a write in `foreachBatch`, from the query's id, which is kept in its checkpoint.

        def publish(batch, batch_id):
            batch.write.format("millpond").mode("append").option("txn", millpond.spark.txn(batch, batch_id)).save()

    Give each write a `name` if there are several for one batch. `checkpoint` is the query's `checkpointLocation`: the
    id is then read from there. A client of Spark Connect needs it, because it does not know the id.
    """
    if checkpoint is not None:
        return _named(_query_of(batch, checkpoint), batch_id, name)
    try:
        query = batch.sparkSession.sparkContext.getLocalProperty(_QUERY)
    except Exception as e:
        raise Unsupported(
            "a client of Spark Connect does not know the id of its query: pass its checkpointLocation, "
            'millpond.spark.txn(batch, batch_id, checkpoint="…")'
        ) from e
    if not query:
        raise Unsupported("txn() is for the function of foreachBatch; elsewhere there is no query: give a name")
    return _named(query, batch_id, name)


def _query_of(batch: DataFrame, checkpoint: str) -> str:
    """The id of the query that has this checkpoint; Spark writes it before the first batch."""
    found = batch.sparkSession.read.text(f"{checkpoint.rstrip('/')}/metadata").collect()
    return str(msgspec.json.decode(found[0][0])["id"])


def _named(query: str, batch_id: int, name: str) -> str:
    return f"{query}/{batch_id}/{name}" if name else f"{query}/{batch_id}"
