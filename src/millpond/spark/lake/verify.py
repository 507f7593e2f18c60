"""Compares a lake with its databases, message by message."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from functools import partial, reduce
from typing import TYPE_CHECKING, Any
from uuid import UUID

import msgspec

from millpond.clock import as_datetime, time_us
from millpond.errors import LakeFenced
from millpond.loop import outside_loop
from millpond.seam.exports import ExportedRange
from millpond.spark.archive import table
from millpond.spark.lake.export import shards_of
from millpond.spark.lake.ranges import pieces
from millpond.spark.lake.read import read, unreadable
from millpond.spark.lake.storage import storage_of
from millpond.spark.lake.table import Lake
from millpond.spark.options import SparkShard, database_options
from millpond.table_prefix import TABLE_PREFIX
from millpond.transports import connect

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


_CHUNK = 1000
"""Messages per transaction."""
_TRIES = 5


class Checked(msgspec.Struct, frozen=True, kw_only=True):
    """Result of a check."""

    checked: int
    """Number of archived messages in the databases that the lake should hold."""
    missing: int
    """Number of them that the lake does not hold."""
    duplicates: int
    """Number of surplus copies in the lake."""
    unreadable: int = 0
    """Number of messages in the lake, of those still archived, with values that did not fit their fields."""
    repaired: bool = False
    """True if missing messages were dated anew and the databases have new numbers for purge."""


def check(
    spark: SparkSession,
    path: str | os.PathLike[str],
    url: str | None = None,
    *,
    schema: str | None = None,
    table_prefix: str = TABLE_PREFIX,
    repair: bool = False,
    pooler: bool = False,
    storage_options: Mapping[str, str] | None = None,
) -> Checked:
    """Compare the lake with the archives that its databases still have, message by message.

    Only files from the time of the oldest archived message on are read. `repair` gives missing messages the present
    time, so the next export takes them, and records the numbers of the others, so purge deletes those again. It raises
    `LakeIncomplete` if messages are missing and the database has another lake, which would get them twice. `pooler` is
    true if connections pass a pooler in transaction mode.
    """
    from pyspark.sql import DataFrame
    from pyspark.sql.functions import col, lit
    from pyspark.sql.functions import min as min_

    lake = Lake.open(storage_of(path, storage_options))
    shards = shards_of(url, schema, table_prefix, pooler=pooler)
    parts = []
    for shard in shards:
        until = lake.until(shard.number)
        if until is not None:
            archived = table(spark, database_options([shard]), "archive", ("id", "archived_at"))
            exported = archived.where(col("archived_at") < lit(as_datetime(until)))
            parts.append(exported.select(lit(shard.number).alias("shard"), "id", "archived_at"))
    wanted = reduce(DataFrame.unionByName, parts) if parts else None
    oldest = wanted.agg(min_("archived_at")).collect()[0][0] if wanted is not None else None
    missing: list[tuple[int, str, datetime]] = []
    checked: dict[int, int] = {}
    duplicates = unfit = 0
    if wanted is not None and oldest is not None:
        # With archived_at: an id that was used again after its dedupe window was archived at another time.
        given: dict[str, Any] = {"since": oldest.astimezone(UTC), "storage_options": storage_options}
        lake_from = read(spark, path, **given)
        held = lake_from.select("shard", "id", "archived_at")
        # Counted first: a message that appears later makes the numbers differ, and a repair then changes none.
        checked = {row[0]: row[1] for row in wanted.groupBy("shard").count().collect()}
        lacking = wanted.join(held, ["shard", "id", "archived_at"], "left_anti")
        missing = [(row[0], row[1], row[2].astimezone(UTC)) for row in lacking.collect()]
        duplicates = held.count() - held.distinct().count()
        unfit = sum(row.messages for row in unreadable(spark, path, **given).collect())
    if repair:
        for shard in shards:
            if lake.until(shard.number) is not None:
                rows = [(UUID(id_), time_us(at, "archived_at")) for n, id_, at in missing if n == shard.number]
                found = checked.get(shard.number, 0) - len(rows)
                outside_loop(partial(asyncio.run, repair_shard(lake, shard, rows, found)))
    numbers = {"checked": sum(checked.values()), "missing": len(missing), "duplicates": duplicates}
    return Checked(**numbers, unreadable=unfit, repaired=repair)


async def repair_shard(lake: Lake, shard: SparkShard, missing: Sequence[tuple[UUID, int]], found: int) -> None:
    """Date the missing messages of a shard anew, and record the numbers of the others.

    `lake` is as it was compared: `found` messages archived before its time were in it.
    """
    until = lake.until(shard.number)
    if until is None:
        return
    store = await connect(shard.url.raw, **shard.store_options, migrate=False, call_timeout=3600)
    try:
        for start in range(0, len(missing), _CHUNK):
            await store.exports.redate(lake.id, missing[start : start + _CHUNK])
        for _ in range(_TRIES):
            later = await asyncio.to_thread(_later, Lake.open(lake.storage), shard.number, until)
            if await store.exports.recount(lake.id, until, found, later):
                return
    finally:
        await store.close()
    raise LakeFenced(
        f"exports to the lake {lake.storage.root} ended {_TRIES} times while their numbers were read, and purge has no "
        "new numbers. Run millpond lake check --repair again, between two exports"
    )


def _later(lake: Lake, shard: int, until: int) -> list[ExportedRange]:
    """The ranges that exports have committed since the lake was compared."""
    now = lake.until(shard)
    if now is None or now <= until:
        return []
    return pieces(until, now, lake.count_by_minute(shard, until, now))
