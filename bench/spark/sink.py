"""Writing messages: our sink against Spark's JDBC append into a table with the same columns and indexes."""

import time
from collections.abc import Callable

from bench.measure import Measurement, Work, ratio, take_turns
from bench.spark.setup import JDBC, PAYLOAD, Setup

ATOMIC, LOOSE, BEST, PLAIN = "atomic", "atomic=false", "JDBC, reWriteBatchedInserts", "JDBC, plain"
BARS = ((LOOSE, BEST, 1.1), (ATOMIC, BEST, 0.6), (ATOMIC, PLAIN, 1.3))


async def sink(setup: Setup, rows: int, rounds: int) -> list[Measurement]:
    """All ways alternate in every round, into empty tables; the first round is a warm-up."""
    works = {
        ATOMIC: _work(setup, lambda: _ours(setup, rows, atomic=True)),
        LOOSE: _work(setup, lambda: _ours(setup, rows, atomic=False)),
        BEST: _work(setup, lambda: _jdbc(setup, rows, rewrite=True)),
        PLAIN: _work(setup, lambda: _jdbc(setup, rows, rewrite=False)),
    }
    took = await take_turns(works, rounds + 1)
    found = []
    for ours, theirs, bar in BARS:
        name = f"spark-sink-{'atomic' if ours is ATOMIC else 'loose'}-{'best' if theirs is BEST else 'plain'}"
        what = f"df.write of {rows:,} rows, {ours}"
        found.append(ratio(name, what, theirs, took[ours][1:], took[theirs][1:], rows, at_least=bar))
    return found


def _work(setup: Setup, write: Callable[[], None]) -> Work:
    async def timed() -> float:
        tables = ", ".join(f"{prefix}message" for prefix in ("millpond_", JDBC))
        setup.execute(f"TRUNCATE {tables}", "VACUUM millpond_staging, millpond_lot", "CHECKPOINT")
        began = time.monotonic()
        write()
        return time.monotonic() - began

    return timed


def _ours(setup: Setup, rows: int, *, atomic: bool) -> None:
    frame = setup.spark.range(0, rows, 1, 2).selectExpr(f"cast(repeat('x', {PAYLOAD}) as binary) as payload")
    options = {"url": setup.url, "queue": "bench", "atomic": str(atomic).lower()}
    frame.write.format("millpond").mode("append").options(**options).save()


def _jdbc(setup: Setup, rows: int, *, rewrite: bool) -> None:
    now = time.time_ns() // 1000
    frame = setup.spark.range(0, rows, 1, 2).selectExpr(
        # In ascending order, the best case for an index.
        "format_string('01900000-0000-7000-8000-%012x', id) as id",
        f"{now}L as created_at",
        f"{now}L as due_at",
        "cast(50 as short) as priority",
        "'PENDING' as state",
        "'bench' as queue",
        f"cast(repeat('x', {PAYLOAD}) as binary) as payload",
    )
    options = {**setup.jdbc(rewrite=rewrite), "dbtable": f"{JDBC}message", "batchsize": "10000"}
    frame.write.format("jdbc").mode("append").options(**options).save()
