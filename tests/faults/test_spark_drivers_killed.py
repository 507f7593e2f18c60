"""Drivers of a streaming query killed with `kill -9`, JVM and Python: at chosen points, and at random."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from typing import Any

import pytest

from tests.faults.conftest import Everywhere
from tests.faults.plan import Aim
from tests.faults.processes import history, some_time
from tests.faults.setup import Setup
from tests.faults.spark_queries import Queries, held, judge, publish

FILES = [
    ("claim", "after"),
    ("partitions", "after"),
    ("read", "amid"),
    ("sink", "after"),
    ("ack", "before"),
    ("ack", "after"),
    ("commit", "before"),
    ("commit", "after"),
]
"""Points of our source, and of the sink in the same query."""
QUEUE = [("write", "after"), ("publish", "before"), ("publish", "after")]
"""Points of our sink: its tasks, and the transaction that publishes their rows."""
SHORT = [("publish", "after")]
"""The most dangerous one: the rows are published, and no checkpoint knows it."""
PER_TRIGGER = 20
KILLS = 50


async def die_at(points: Sequence[tuple[str, str]], here: Setup, sink: str, spark: Any, apart: int = 2) -> None:
    """Each driver repeats the batch in which the previous one died, and dies some batches later. This process handles
    the rest."""
    await publish(here, PER_TRIGGER * (apart * len(points) + 2))
    queries = Queries(here, per_trigger=PER_TRIGGER, sink=sink)
    aims = [Aim(point, when, nth=apart * n) for n, (point, when) in enumerate(points, 1)]
    spare = queries.prepare(aims[0])
    for n, aim in enumerate(aims):
        driver = queries.go(spare)
        if n + 1 < len(aims):
            spare = queries.prepare(aims[n + 1])
        driver = await queries.ended(driver)
        assert driver.code == -signal.SIGKILL, driver.log[-6000:]
        deaths = [(line["died"], line["when"], line["seq"]) for line in history(here.folder).read() if "died" in line]
        # Two tasks may reach a point at once, and both record it.
        assert list(dict.fromkeys(deaths))[n:] == [(aim.point, aim.when, aim.nth)], "it died where it should"
    await queries.finish_on(spark)
    await judge(here, f"spark drivers killed at points, {sink}", len(points), await queries.sunk())


@pytest.mark.slow
@pytest.mark.databases("postgres")
async def test_at_some_points(everywhere: Everywhere, spark: Any) -> None:
    await everywhere(lambda here: die_at(SHORT, here, "queue", spark, apart=1))


@pytest.mark.long
@pytest.mark.parametrize(("sink", "points"), [("queue", QUEUE), ("files", FILES)], ids=["queue", "files"])
@pytest.mark.databases("postgres", "mariadb", "sqlite")
async def test_at_chosen_points(
    everywhere: Everywhere, spark: Any, sink: str, points: Sequence[tuple[str, str]]
) -> None:
    await everywhere(lambda here: die_at(points, here, sink, spark))


async def die_at_random(here: Setup, queries: Queries, kills: int) -> int:
    """Kill one driver after the other, each with a prepared replacement; the number that held messages when killed."""
    in_flight = 0
    driver, spare = queries.start(), queries.prepare()
    for _ in range(kills):
        driver = await queries.advance(driver, here.chance.choice((0, 1, 1, 2)))
        await some_time(here.chance, 0.0, 1.0)
        assert driver.code is None, f"all was done before the last kill:\n{driver.log[-3000:]}"
        driver.kill()
        in_flight += await held(here) > 0
        driver, spare = queries.go(spare), queries.prepare()
    spare.kill()
    await queries.finish(driver)
    return in_flight


@pytest.mark.long
@pytest.mark.databases("postgres")
async def test_at_random(everywhere: Everywhere) -> None:
    async def scenario(here: Setup) -> None:
        await publish(here, 200_000)
        queries = Queries(here, per_trigger=1000)
        in_flight = await die_at_random(here, queries, KILLS)
        await judge(here, "spark drivers killed at random", KILLS, await queries.sunk(), in_flight=in_flight)
        assert in_flight > KILLS // 2

    await everywhere(scenario)


@pytest.mark.long
@pytest.mark.databases("postgres")
async def test_from_queue_to_queue(everywhere: Everywhere) -> None:
    """Our source and our sink in one query: each message once in the other queue."""

    async def scenario(here: Setup) -> None:
        kills = 10
        await publish(here, 100_000)
        queries = Queries(here, per_trigger=1000, sink="queue")
        in_flight = await die_at_random(here, queries, kills)
        await judge(here, "spark killed from queue to queue", kills, await queries.sunk(), in_flight=in_flight)
        assert in_flight > kills // 2

    await everywhere(scenario)
