"""Consuming a queue with a stream, against the store's own drain of the same messages."""

from __future__ import annotations

import itertools
import statistics
import tempfile
from collections.abc import Sequence
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

from bench.measure import Measurement, Work, ratio, take_turns
from bench.side import QUEUE
from bench.spark.setup import Setup
from bench.store_side import StoreSide, open_store
from millpond.spark.source import MillpondSource
from millpond.table_prefix import TABLE_PREFIX

BATCHES = 6
WARM_UP = 2
"""The first batches of a query do not count: they start processes and connect."""
DRAIN = 500
"""Messages per claim and ack of the store, as in `bench`."""
BARS = {100_000: 0.5, 10_000: 0.25}
OWN_SHARE_AT = 10_000
OWN_SHARE = 0.4


async def stream(setup: Setup, rows: int, rounds: int) -> list[Measurement]:
    """`rows` limits the messages of a query; its first batches do not count."""
    found = []
    store = await open_store(setup.url)
    try:
        # In a smaller run both are the same.
        for size, bar in {min(size, rows // BATCHES): bar for size, bar in BARS.items()}.items():
            shares: list[float] = []
            works = {"ours": _streamed(setup, size, shares), "theirs": _drained(setup, store, size)}
            took = await take_turns(works, rounds + 1)
            what = f"{size:,} messages a trigger"
            name = f"spark-stream-{size}"
            ours, theirs = took["ours"][1:], took["theirs"][1:]
            against = f"the store's drain, {DRAIN} at once"
            found.append(ratio(name, f"stream, {what}", against, ours, theirs, size, at_least=bar))
            found.append(_share(f"{name}-own", what, shares[1:], OWN_SHARE if size <= OWN_SHARE_AT else None))
    finally:
        await store.close()
    return found


def _streamed(setup: Setup, size: int, shares: list[float]) -> Work:
    """Seconds of a trigger after the warm-up, and our share of them."""

    async def run() -> float:
        await _fill(setup, BATCHES * size)
        batches, own = _query(setup, size)
        whole = [b["durationMs"]["triggerExecution"] / 1000 for b in batches]
        shares.append(sum(own[WARM_UP:]) / sum(whole[WARM_UP:]))
        # From the start of one trigger to the end of another: Spark's work between triggers counts too.
        begin, last = (datetime.fromisoformat(batches[n]["timestamp"]) for n in (WARM_UP, -1))
        return (last - begin + timedelta(seconds=whole[-1])).total_seconds() / (BATCHES - WARM_UP)

    return run


def _query(setup: Setup, size: int) -> tuple[Sequence[dict[str, Any]], Sequence[float]]:
    """Spark's progress for each batch of a query over all messages, and the seconds of its calls to our source."""
    with tempfile.TemporaryDirectory(prefix="millpond-bench-") as folder:
        calls = Path(folder, "calls")
        setup.spark.dataSource.register(_timed(str(calls)))
        source = setup.spark.readStream.format("millpond_timed").options(url=setup.url, queue=QUEUE, stream="bench")
        source = source.option("maxMessagesPerTrigger", size).option("minPartitions", 2)
        writer = source.load().writeStream.format("noop").option("checkpointLocation", f"{folder}/checkpoint")
        query = writer.trigger(availableNow=True).start()
        query.awaitTermination()
        batches = [dict(progress) for progress in query.recentProgress if progress["numInputRows"]]
        own = _by_batch(calls.read_text().splitlines())
    if [batch["numInputRows"] for batch in batches] != [size] * BATCHES:
        raise RuntimeError(f"not {BATCHES} batches of {size}: {[batch['numInputRows'] for batch in batches]}")
    return batches, own[:BATCHES]


def _timed(file: str) -> type[MillpondSource]:
    """The source with timed calls of its driver. A local class: Spark's processes need no import for it."""

    class TimedSource(MillpondSource):
        @classmethod
        def name(cls) -> str:
            return "millpond_timed"

        def streamReader(self, schema: Any) -> Any:
            import time

            from millpond.spark.stream.reader import StreamReader

            class TimedReader(StreamReader):
                def _run(self, work: Any) -> Any:
                    began = time.monotonic()
                    try:
                        return super()._run(work)
                    finally:
                        with open(file, "a") as out:
                            print(work.__name__, time.monotonic() - began, file=out)

            return TimedReader(self.options, schema)

    return TimedSource


def _by_batch(lines: Sequence[str]) -> Sequence[float]:
    """Seconds of the calls of each batch. A batch begins when the engine asks for the latest offset."""
    sums: list[float] = []
    for line in lines:
        name, seconds = line.split()
        if name == "latest":
            sums.append(0.0)
        if sums and name != "waiting":  # reportLatestOffset, called for progress reports
            sums[-1] += float(seconds)
    return sums


def _drained(setup: Setup, store: StoreSide, size: int) -> Work:
    """Seconds for claiming and acking a number of messages."""

    async def run() -> float:
        count = BATCHES * size
        await _fill(setup, count)
        return await store.drain(count, DRAIN) / BATCHES

    return run


_numbers = itertools.count(1)


async def _fill(setup: Setup, count: int) -> None:
    setup.execute(
        "TRUNCATE millpond_message, millpond_archive, millpond_stream, millpond_stream_claim, millpond_stream_message"
    )
    # Later messages each time: a store remembers where its last claim ended.
    await setup.database.fill(setup.url, TABLE_PREFIX, next(_numbers) * 10_000_000, count)
    setup.execute("VACUUM ANALYZE millpond_message", "CHECKPOINT")


def _share(name: str, what: str, shares: Sequence[float], at_most: float | None) -> Measurement:
    return Measurement(
        name=name,
        what=f"the source's own calls, {what}",
        against="the whole trigger",
        value=statistics.median(shares),
        unit="ratio",
        low=min(shares),
        high=max(shares),
        at_most=at_most,
    )
