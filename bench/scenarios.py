"""The measurements, their databases, and the bar of each figure."""

import asyncio
import statistics
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial

from bench.databases import Database
from bench.group_commit import group_commit
from bench.held_latency import held_latency
from bench.imports import importing
from bench.measure import Measurement, Work, ratio, single, take_turns
from bench.on_time import on_time
from bench.scenario import Scenario, fresh
from bench.server_scenarios import SERVER_SCENARIOS
from bench.shards import shards
from bench.side import Side
from bench.sizes import Sizes
from bench.sql_interface import sql_drain, sql_insert
from bench.store_side import StoreSide, open_store
from bench.worker_scenarios import WORKER_SCENARIOS
from millpond.table_prefix import TABLE_PREFIX

RAW = "raw_"
"""Prefix of the tables for the work by hand; the same migrations create them."""


@asynccontextmanager
async def sides(database: Database) -> AsyncIterator[tuple[str, StoreSide, Side]]:
    """Millpond and the work by hand, on equal tables of one database."""
    async with fresh(database) as url:
        await (await open_store(url, RAW)).close()
        ours, raw = await open_store(url), await database.raw(url, RAW)
        try:
            yield url, ours, raw
        finally:
            await ours.close()
            await raw.close()


async def against_raw(
    scenario: Scenario,
    database: Database,
    sizes: Sizes,
    what: str,
    count: int,
    work: Callable[[Side, int], Awaitable[float]],
    *,
    filled: bool,
    against: str = "raw SQL",
) -> list[Measurement]:
    """Run rounds in which Millpond and the work by hand alternate in slices of `count` messages."""
    ours_took, raw_took = [], []
    part = count // sizes.slices
    for _ in range(sizes.rounds):
        async with sides(database) as (url, ours, raw):
            if filled:
                for prefix in (TABLE_PREFIX, RAW):
                    await database.fill(url, prefix, 1, part * sizes.slices)
                await database.tidy(url)
            turns: dict[str, Work] = {"ours": partial(work, ours, part), "raw": partial(work, raw, part)}
            seconds = await take_turns(turns, sizes.slices)
        ours_took.append(sum(seconds["ours"]))
        raw_took.append(sum(seconds["raw"]))
    return [ratio(scenario.name, what, against, ours_took, raw_took, part * sizes.slices, at_least=scenario.bar)]


async def publish(scenario: Scenario, database: Database, sizes: Sizes) -> list[Measurement]:
    """By hand with a notification too, where the database has them."""
    return await _publish(scenario, database, sizes, notify=True)


async def publish_unannounced(scenario: Scenario, database: Database, sizes: Sizes) -> list[Measurement]:
    """By hand without the notification that workers wait for."""
    return await _publish(scenario, database, sizes, notify=False)


async def _publish(scenario: Scenario, database: Database, sizes: Sizes, *, notify: bool) -> list[Measurement]:
    def work(side: Side, count: int) -> Awaitable[float]:
        return side.publish(count, notify=notify)

    what = "publish one by one"
    against = "raw SQL without NOTIFY" if not notify else "raw SQL with NOTIFY" if database.notifies else "raw SQL"
    return await against_raw(scenario, database, sizes, what, sizes.single, work, filled=False, against=against)


async def publish_bulk(scenario: Scenario, database: Database, sizes: Sizes) -> list[Measurement]:
    what = f"publish {sizes.bulk:,} a call"
    count = sizes.bulk * sizes.bulks
    return await against_raw(
        scenario, database, sizes, what, count, lambda side, n: side.publish_bulk(n, sizes.bulk), filled=False
    )


async def drain(scenario: Scenario, database: Database, sizes: Sizes) -> list[Measurement]:
    what = f"drain, batches of {sizes.batch}"
    return await against_raw(
        scenario, database, sizes, what, sizes.drain, lambda side, n: side.drain(n, sizes.batch), filled=True
    )


async def nack(scenario: Scenario, database: Database, sizes: Sizes) -> list[Measurement]:
    what = f"nack, batches of {sizes.batch}"
    return await against_raw(
        scenario, database, sizes, what, sizes.drain, lambda side, n: side.nack(n, sizes.batch), filled=True
    )


async def in_flight(scenario: Scenario, database: Database, sizes: Sizes) -> list[Measurement]:
    """Drain while another consumer holds many messages and settles none."""
    busy_took, idle_took = [], []
    part = sizes.drain // sizes.slices
    for _ in range(sizes.rounds):
        async with fresh(database) as url:
            busy, idle, other = await open_store(url), await open_store(url, "idle_"), await open_store(url)
            await database.fill(url, "idle_", 1, sizes.drain)
            await database.fill(url, TABLE_PREFIX, 1, sizes.drain + sizes.in_flight)
            await database.tidy(url)
            await other.claim_all(sizes.in_flight, sizes.batch)
            turns: dict[str, Work] = {
                "busy": partial(busy.drain, part, sizes.batch),
                "idle": partial(idle.drain, part, sizes.batch),
            }
            seconds = await take_turns(turns, sizes.slices)
            for side in (busy, idle, other):
                await side.close()
        busy_took.append(sum(seconds["busy"]))
        idle_took.append(sum(seconds["idle"]))
    what = f"drain, {sizes.in_flight:,} messages in flight elsewhere"
    return [
        ratio(scenario.name, what, "none in flight", busy_took, idle_took, part * sizes.slices, at_least=scenario.bar)
    ]


async def backlog(scenario: Scenario, database: Database, sizes: Sizes) -> list[Measurement]:
    """Drain a part of backlogs of several sizes; each is refilled after every turn."""
    part = sizes.backlogs[0] // 2
    turns_each = max(1, sizes.drain // part)
    async with fresh(database) as url, AsyncExitStack() as stack:
        works: dict[str, Work] = {}
        for size in sizes.backlogs:
            prefix = f"b{size}_"
            side = await open_store(url, prefix)
            stack.push_async_callback(side.close)
            await database.fill(url, prefix, 1, size)
            works[f"{size:,}"] = _Refilled(
                partial(side.drain, part, sizes.batch), partial(database.fill, url, prefix), size, part
            )
        await database.tidy(url)
        seconds = await take_turns(works, turns_each)
    first, *others = works
    return [
        ratio(
            f"{scenario.name}-{_short(size)}",
            f"drain, backlog of {name}",
            f"a backlog of {first}",
            seconds[name],
            seconds[first],
            part,
            at_least=scenario.bar,
        )
        for size, name in zip(sizes.backlogs[1:], others, strict=True)
    ]


class _Refilled:
    """Drain a part, then append the same number of messages; only the drain counts."""

    def __init__(self, drain: Work, refill: Callable[[int, int], Awaitable[None]], size: int, part: int) -> None:
        self._drain = drain
        self._refill = refill
        self._next = size + 1
        self._part = part

    async def __call__(self) -> float:
        seconds = await self._drain()
        await self._refill(self._next, self._part)
        self._next += self._part
        return seconds


async def held(scenario: Scenario, database: Database, sizes: Sizes) -> list[Measurement]:
    """Drain while another transaction is held open, which keeps the server from removing dead rows."""
    count = sizes.held[scenario.database]
    part = max(sizes.batch, count // 20)
    turns = count // part
    took: dict[str, list[float]] = {"held": [], "free": []}
    last = []
    for _ in range(sizes.held_rounds):
        async with fresh(database) as url, fresh(database) as free_url:
            side, free = await open_store(url), await open_store(free_url)
            for each in (url, free_url):
                await database.fill(each, TABLE_PREFIX, 1, count)
                await database.tidy(each)
            seconds = await _held_and_free(
                database,
                url,
                {"held": partial(side.drain, part, sizes.batch), "free": partial(free.drain, part, sizes.batch)},
                turns,
            )
            await side.close()
            await free.close()
        for name, parts in seconds.items():
            took[name].append(sum(parts))
        fifth = max(1, turns // 5)
        last.append(sum(seconds["free"][-fifth:]) / sum(seconds["held"][-fifth:]))
    what = f"drain of {count:,} with a transaction held open"
    result = ratio(scenario.name, what, "none open", took["held"], took["free"], count, at_least=scenario.bar)
    return [result.with_facts({"ratio in the last fifth": round(statistics.median(last), 3)})]


async def _held_and_free(database: Database, url: str, works: dict[str, Work], turns: int) -> dict[str, list[float]]:
    if database.holds_itself_only:
        async with database.hold(url):
            return await take_turns(works, turns)
    free = await take_turns({"free": works["free"]}, turns)
    async with database.hold(url):
        return free | await take_turns({"held": works["held"]}, turns)


async def memory(scenario: Scenario, database: Database, sizes: Sizes) -> list[Measurement]:
    """Measure in a new process, because earlier measurements enlarge the memory of this one."""
    async with fresh(database) as url:
        await (await open_store(url)).close()
        await database.fill(url, TABLE_PREFIX, 1, sizes.memory)
        await database.tidy(url)
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "bench.memory", str(sizes.memory), str(sizes.batch)),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
        )
        output, _ = await process.communicate(url.encode())  # not as an argument: it contains a password
        if process.returncode:
            raise RuntimeError(f"the process ended with {process.returncode}")
        growth = float(output)
    return [
        single(
            scenario.name,
            f"memory after claiming and settling {sizes.memory:,}",
            "before",
            growth,
            "MiB",
            at_most=scenario.bar,
            messages=sizes.memory,
        )
    ]


def _short(size: int) -> str:
    return f"{size // 1_000_000}m" if size >= 1_000_000 else f"{size // 1_000}k" if size >= 1_000 else str(size)


def _all() -> list[Scenario]:
    """All scenarios in the order of the table: first the comparisons with raw SQL."""
    found = []
    for database in ("postgres", "mariadb", "sqlite"):
        is_postgres = database == "postgres"
        found += [
            Scenario(database, "publish", publish, 0.9 if is_postgres else None),
            *([Scenario(database, "publish-unannounced", publish_unannounced)] if is_postgres else []),
            Scenario(database, "publish-bulk", publish_bulk, 0.6 if is_postgres else 0.7),
            Scenario(database, "drain", drain, 0.8 if is_postgres else 0.7),
            Scenario(database, "nack", nack, 0.7 if is_postgres else None),
        ]
    found += [
        Scenario("postgres", "sql-drain", sql_drain, 0.9),
        Scenario("postgres", "sql-insert", sql_insert, 0.6),
        Scenario("postgres", "group-commit", group_commit, 0.3),
        Scenario("mariadb", "group-commit", group_commit),
        Scenario("sqlite", "group-commit", group_commit, 0.3),
        Scenario("postgres", "shards", shards),
        Scenario("postgres", "in-flight", in_flight, 0.8),
        Scenario("mariadb", "in-flight", in_flight),
        Scenario("sqlite", "in-flight", in_flight),
        Scenario("postgres", "backlog", backlog, 0.7),
        Scenario("postgres", "held", held, 0.7),
        Scenario("mariadb", "held", held),
        Scenario("postgres", "held-latency", held_latency, 100),
        Scenario("postgres", "on-time", on_time, 200),
        Scenario("mariadb", "on-time", on_time, 1000),
        Scenario("sqlite", "on-time", on_time, 1000),
        Scenario("postgres", "memory", memory, 50),
        Scenario("mariadb", "memory", memory, 50),
        Scenario("sqlite", "memory", memory, 50),
        Scenario("sqlite", "import", importing, 0.45),
    ]
    return [*found, *SERVER_SCENARIOS, *WORKER_SCENARIOS]


SCENARIOS = _all()
