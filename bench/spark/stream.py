"""Consuming a queue with a stream, against the store's own drain of the same messages."""

import statistics
import tempfile
from typing import Any

from bench.measure import Measurement, Work, ratio, take_turns
from bench.side import QUEUE
from bench.spark.ground import Ground
from bench.store_side import StoreSide, open_store

BATCHES = 6
WARM_UP = 2
"""Batches at the beginning of a query that do not count: the first ones start processes and connect."""
BARS = {100_000: 0.5, 10_000: 0.25}
OWN_SHARE_AT = 10_000
OWN_SHARE = 0.4


async def stream(ground: Ground, rows: int, rounds: int) -> list[Measurement]:
    """`rows` bounds the larger batches; each query takes some of them, of which the first do not count."""
    found = []
    store = await open_store(ground.url)
    try:
        for bar_at, bar in BARS.items():
            size = min(bar_at, rows // BATCHES)
            shares: list[float] = []
            works = {"ours": _streamed(ground, store, size, shares), "theirs": _drained(ground, store, size)}
            took = await take_turns(works, rounds + 1)
            found.append(
                ratio(
                    f"spark-stream-{size // 1000}k",
                    f"stream, {size:,} messages a trigger",
                    "the store's drain",
                    took["ours"][1:],
                    took["theirs"][1:],
                    size,
                    at_least=bar,
                )
            )
            if bar_at == OWN_SHARE_AT:
                found.append(_share(shares[1:], size))
    finally:
        await store.close()
    return found


def _streamed(ground: Ground, store: StoreSide, size: int, shares: list[float]) -> Work:
    """Seconds of a trigger when the query has warmed up, and our part of them."""

    async def run() -> float:
        await _fill(ground, store, BATCHES * size)
        batches = _progress(ground, size)[WARM_UP:]
        own = [b["durationMs"]["latestOffset"] + b["durationMs"].get("queryPlanning", 0) for b in batches]
        whole = [b["durationMs"]["triggerExecution"] for b in batches]
        shares.append(statistics.median(a / b for a, b in zip(own, whole, strict=True)))
        return statistics.median(whole) / 1000

    return run


def _progress(ground: Ground, size: int) -> list[dict[str, Any]]:
    """What Spark tells of each full batch of a query over all that is there."""
    source = ground.spark.readStream.format("millpond").options(url=ground.url, queue=QUEUE, stream="bench")
    source = source.option("maxMessagesPerTrigger", size).option("minPartitions", 2)
    with tempfile.TemporaryDirectory(prefix="millpond-bench-") as checkpoint:
        writer = source.load().writeStream.format("noop").option("checkpointLocation", checkpoint)
        query = writer.trigger(availableNow=True).start()
        query.awaitTermination()
        batches = [dict(p) for p in query.recentProgress if p["numInputRows"] == size]
    if len(batches) < BATCHES - 1:
        raise RuntimeError(f"{len(batches)} full batches, not {BATCHES}")
    return batches


def _drained(ground: Ground, store: StoreSide, size: int) -> Work:
    """Seconds of so many messages through claim and ack."""

    async def run() -> float:
        count = BATCHES * size
        await _fill(ground, store, count)
        return await store.drain(count, 500) / BATCHES

    return run


async def _fill(ground: Ground, store: StoreSide, count: int) -> None:
    ground.execute("TRUNCATE message, message_archive, message_stream, message_stream_claim, message_stream_message")
    await store.publish_bulk(count, 5_000)
    ground.execute("VACUUM ANALYZE message")


def _share(shares: list[float], size: int) -> Measurement:
    return Measurement(
        name="spark-stream-own",
        what=f"the source's own calls and the planning around them, {size:,} messages a trigger",
        against="the whole trigger",
        value=statistics.median(shares),
        unit="ratio",
        low=min(shares),
        high=max(shares),
        at_most=OWN_SHARE,
    )
