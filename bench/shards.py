"""A pond of several databases on one server: processor time, log and commits of a message, and the rate of a drain."""

import asyncio
import gc
import statistics
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Any

import asyncpg

from bench.databases import Database
from bench.measure import Measurement, ratio
from bench.scenario import Scenario, fresh
from bench.side import LEASE, PAYLOAD, QUEUE, now
from bench.sizes import Sizes
from millpond import Ack, Claim, Message, Transport, connect, transports
from millpond.transports import init_shards
from millpond.transports.sharded import connect as sharded
from millpond.transports.sharded.store import ShardedStore
from millpond.transports.url import Url

ONE_SHARD = 0
"""One database that is a pond of one shard: routed and checked as several are."""
COUNTS = (1, ONE_SHARD, 2, 4, 8)
"""Numbers of databases."""
GROWTH = 1.1
"""The largest processor time of a message with 8 databases, against that with one."""
DRAIN = (4, 0.9)
"""Number of databases of the drain, and the least share of the rate of one."""
_ROUNDS = 5
_FINISH = 60.0
"""Maximum seconds for the last messages of a drain."""


@dataclass(frozen=True)
class Cost:
    """The cost of one message that is published, claimed and acked into the archive."""

    client: float
    """Seconds of processor time of this process."""
    servers: float
    """The same of the server with all of its processes."""
    wal: float
    """Bytes of the server's log."""
    commits: float

    @property
    def cpu(self) -> float:
        return self.client + self.servers


Costs = dict[str, Cost]
"""With the same load for each database, and with the same load for all together."""


async def shards(scenario: Scenario, database: Database, sizes: Sizes) -> list[Measurement]:
    """The numbers of databases take turns, and the first of them changes."""
    costs: dict[int, list[Costs]] = {n: [] for n in COUNTS}
    took: dict[str, list[float]] = {}
    for turn in range(min(sizes.rounds, _ROUNDS)):
        first = turn % len(COUNTS)
        for n in (*COUNTS[first:], *COUNTS[:first]):
            costs[n].append(await _costs(database, n, sizes))
        many = DRAIN[0]
        for n in (1, many) if turn % 2 else (many, 1):
            for name, seconds in (await _drain_times(database, n, sizes)).items():
                took.setdefault(f"{n} {name}", []).append(seconds)
    each, all_ = f"{sizes.batch} at once for each database", f"{sizes.batch} at once for all databases"
    found = [_grown(scenario, costs, "each", each, f"cost-{n}", 1, n, GROWTH if n == 8 else None) for n in (2, 4, 8)]
    found += [_grown(scenario, costs, "each", each, "cost-8-shards", ONE_SHARD, 8, None)]
    found += [_grown(scenario, costs, "all", all_, f"cost-thin-{n}", 1, n, None) for n in (2, 4, 8)]
    for name, what, bar in (("each", each, DRAIN[1]), ("all", all_, None)):
        found.append(
            ratio(
                f"{scenario.name}-drain" + ("" if name == "each" else "-thin"),
                f"drain, {DRAIN[0]} databases, {what}",
                "one database",
                took[f"{DRAIN[0]} {name}"],
                took[f"1 {name}"],
                sizes.drain // 2,
                at_least=bar,
            )
        )
    return found


def _grown(
    scenario: Scenario, costs: dict[int, list[Costs]], way: str, what: str, name: str, few: int, many: int, bar: Any
) -> Measurement:
    one, other = [each[way] for each in costs[few]], [each[way] for each in costs[many]]
    ratios = [b.cpu / a.cpu for a, b in zip(one, other, strict=True)]
    facts: dict[str, Any] = {"rounds": len(ratios), "ratios": [round(r, 3) for r in ratios]}
    for count, found in ((few or "one shard", one), (many, other)):
        facts |= {f"{text} of {count}": value for text, value in _medians(found).items()}
    return Measurement(
        f"{scenario.name}-{name}",
        f"processor time of a message, {many} databases, {what}",
        "one database" if few else "a pond of one shard",
        statistics.median(ratios),
        "ratio",
        low=min(ratios),
        high=max(ratios),
        at_most=bar,
        facts=facts,
    )


def _medians(costs: Sequence[Cost]) -> dict[str, float]:
    return {
        "client us": round(1e6 * statistics.median(one.client for one in costs), 2),
        "server us": round(1e6 * statistics.median(one.servers for one in costs), 2),
        "wal bytes": round(statistics.median(one.wal for one in costs), 1),
        "commits": round(statistics.median(one.commits for one in costs), 5),
    }


# --- the work ---------------------------------------------------------------------------------------


@asynccontextmanager
async def databases(database: Database, shards: int) -> AsyncIterator[list[str]]:
    """URLs of new databases on one server. One is a single database, unless it is `ONE_SHARD`."""
    async with AsyncExitStack() as stack:
        urls = [await stack.enter_async_context(fresh(database)) for _ in range(max(1, shards))]
        for url in urls:
            await (await connect(url, migrate=True)).close()
        if shards != 1:
            await init_shards(urls)
        yield urls


async def open_pond(urls: Sequence[str]) -> ShardedStore:
    """A pond of shards, also of one: `connect` would open that as a single database."""
    room = transports._sharded_transactions(urls, {})
    return await sharded.connect([Url(url) for url in urls], transports._connect_shard, room, {})


async def _open(urls: Sequence[str], n: int) -> Transport:
    return await open_pond(urls) if n == ONE_SHARD else await connect(urls)


async def publish(store: Transport, count: int, size: int) -> None:
    while count > 0:
        await store.publish([Message(queue=QUEUE, payload=PAYLOAD) for _ in range(min(size, count))])
        count -= size


async def drain(store: Transport, count: int, batch: int) -> None:
    """Ack each batch while the next is being claimed. Over shards a claim may return fewer messages than there are."""
    left, give_up_at = count, now() + _FINISH
    settling: asyncio.Future[None] | None = None

    async def ack(claims: Sequence[Claim]) -> None:
        if await store.settle([Ack(claim.receipt) for claim in claims]):
            raise RuntimeError("a receipt was refused")

    while left > 0:
        claims = await store.claim([QUEUE], batch, LEASE)
        if not claims and now() > give_up_at:
            raise RuntimeError(f"{left} of {count} messages were missing")
        left -= len(claims)
        if settling is not None:
            await settling
        settling = asyncio.ensure_future(ack(claims)) if claims else None
    if settling is not None:
        await settling


async def _costs(database: Database, n: int, sizes: Sizes) -> Costs:
    count, found = sizes.drain // 2, {}
    async with databases(database, n) as urls, _observer(urls[0]) as observer:
        warmed_up = await _commits_of_warm_up(observer, urls, n)
        # With more databases a program has more to do: each gets the same load. Or all together get the load of one.
        for way, times in (("each", len(urls)), ("all", 1)):
            before = await _commits(observer, urls)
            store = await _open(urls, n)
            await _warm_up(store, len(urls))
            gc.collect()
            wal, client, servers = await _wal(observer), time.process_time(), database.cpu()
            await publish(store, count, sizes.bulk * times)
            await drain(store, count, sizes.batch * times)
            client, servers = time.process_time() - client, database.cpu() - servers
            wal = await _wal(observer) - wal
            await store.close()
            commits = await _commits(observer, urls) - before - warmed_up
            found[way] = Cost(client / count, servers / count, wal / count, commits / count)
    return found


async def _drain_times(database: Database, n: int, sizes: Sizes) -> dict[str, float]:
    """Seconds of a drain with the same batch for each database, and for all together."""
    found = {}
    async with databases(database, n) as urls:
        store = await connect(urls)
        await _warm_up(store, n)
        for way, batch in (("each", sizes.batch * n), ("all", sizes.batch)):
            await publish(store, sizes.drain // 2, sizes.bulk)
            for url in urls:
                await database.tidy(url)
            gc.collect()
            began = now()
            await drain(store, sizes.drain // 2, batch)
            found[way] = now() - began
        await store.close()
    return found


async def _warm_up(store: Transport, n: int) -> None:
    """Connections and prepared statements on each database."""
    for _ in range(2):
        await publish(store, 50 * n, 50 * n)
        await drain(store, 50 * n, 50 * n)


# --- counters of the server -------------------------------------------------------------------------


@asynccontextmanager
async def _observer(url: str) -> AsyncIterator[asyncpg.Connection]:
    """A connection to another database of the server: its own transactions do not count."""
    connection = await asyncpg.connect(f"{url.rpartition('/')[0]}/postgres")
    try:
        yield connection
    finally:
        await connection.close()


async def _wal(observer: asyncpg.Connection) -> float:
    return float(await observer.fetchval("SELECT pg_current_wal_lsn() - '0/0'::pg_lsn"))


async def _commits_of_warm_up(observer: asyncpg.Connection, urls: list[str], n: int) -> int:
    """Commits of a program that connects, warms up and closes."""
    before = await _commits(observer, urls)
    store = await _open(urls, n)
    await _warm_up(store, len(urls))
    await store.close()
    return await _commits(observer, urls) - before


async def _commits(observer: asyncpg.Connection, urls: Sequence[str]) -> int:
    """Sessions report the last of their transactions when they end."""
    names = [url.rpartition("/")[2] for url in urls]
    query = "SELECT count(*) FROM pg_stat_activity WHERE datname = ANY($1) AND backend_type = 'client backend'"
    give_up_at = now() + _FINISH
    while await observer.fetchval(query, names):
        if now() > give_up_at:
            raise TimeoutError("sessions do not end")
        await asyncio.sleep(0.01)
    return int(await observer.fetchval("SELECT sum(xact_commit) FROM pg_stat_database WHERE datname = ANY($1)", names))
