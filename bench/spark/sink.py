"""Writing messages: our sink against Spark's JDBC append into a table with the same columns and indexes."""

import time
from collections.abc import Callable

from bench.measure import Measurement, Work, ratio, take_turns
from bench.spark.ground import JDBC, PAYLOAD, Ground

ATOMIC, LOOSE, BEST, PLAIN = "atomic", "atomic=false", "JDBC, reWriteBatchedInserts", "JDBC, plain"
BARS = ((LOOSE, BEST, 1.1), (ATOMIC, BEST, 0.6), (ATOMIC, PLAIN, 1.3))


async def sink(ground: Ground, rows: int, rounds: int) -> list[Measurement]:
    """Each way takes its turn in every round, into empty tables; a first round warms everything up."""
    works = {
        ATOMIC: _work(ground, lambda: _ours(ground, rows, atomic=True)),
        LOOSE: _work(ground, lambda: _ours(ground, rows, atomic=False)),
        BEST: _work(ground, lambda: _jdbc(ground, rows, rewrite=True)),
        PLAIN: _work(ground, lambda: _jdbc(ground, rows, rewrite=False)),
    }
    took = await take_turns(works, rounds + 1)
    found = []
    for ours, theirs, bar in BARS:
        name = f"spark-sink-{'atomic' if ours is ATOMIC else 'loose'}-{'best' if theirs is BEST else 'plain'}"
        what = f"df.write of {rows:,} rows, {ours}"
        found.append(ratio(name, what, theirs, took[ours][1:], took[theirs][1:], rows, at_least=bar))
    return found


def _work(ground: Ground, write: Callable[[], None]) -> Work:
    async def timed() -> float:
        tables = ", ".join(f"{prefix}message" for prefix in ("", JDBC))
        ground.execute(f"TRUNCATE {tables}", "VACUUM message_staging, message_lot", "CHECKPOINT")
        began = time.monotonic()
        write()
        return time.monotonic() - began

    return timed


def _ours(ground: Ground, rows: int, *, atomic: bool) -> None:
    frame = ground.spark.range(0, rows, 1, 2).selectExpr(f"cast(repeat('x', {PAYLOAD}) as binary) as payload")
    options = {"url": ground.url, "queue": "bench", "atomic": str(atomic).lower()}
    frame.write.format("millpond").mode("append").options(**options).save()


def _jdbc(ground: Ground, rows: int, *, rewrite: bool) -> None:
    now = time.time_ns() // 1000
    frame = ground.spark.range(0, rows, 1, 2).selectExpr(
        # In order, which is best for an index.
        "format_string('01900000-0000-7000-8000-%012x', id) as id",
        f"{now}L as created_at",
        f"{now}L as due_at",
        "cast(50 as short) as priority",
        "cast(50 as short) as lane",
        "'PENDING' as state",
        "'bench' as queue",
        f"cast(repeat('x', {PAYLOAD}) as binary) as payload",
    )
    options = {**ground.jdbc(rewrite=rewrite), "dbtable": f"{JDBC}message", "batchsize": "10000"}
    frame.write.format("jdbc").mode("append").options(**options).save()
