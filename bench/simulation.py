"""`python -m bench.simulation`: ponds of 1 to 256 shards in virtual time, compared with real ones of 1, 2 and 4.

It runs the real pond of several shards: connecting, routing, claims, outcomes, breakers, and the choice of the shards
that a worker attends. Only the databases are stand-ins. Their service times are measured on PostgreSQL first, in the
same run. The exit code is 1 if a real rate and the simulated one differ by more than 15 %, or if a shard in trouble
takes more than 5 % of the others' rate.
"""

import argparse
import asyncio
import contextlib
import os
import random
import statistics
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from bench import virtual_time
from bench.databases import Database as Server
from bench.databases import PostgresDatabase
from bench.shards import ONE_SHARD, databases, open_pond
from bench.side import LEASE, PAYLOAD, QUEUE
from bench.stand_in import Costs, Database, Line, Machine, Program, StandIn, Times
from millpond import Ack, Message
from millpond.errors import StoreUnavailable
from millpond.message import Claim, Receipt
from millpond.transports.shard_map import ShardMap, ShardRecord
from millpond.transports.sharded import connect as sharded
from millpond.transports.sharded.members import AT_ONCE
from millpond.transports.sharded.store import ShardedStore
from millpond.transports.sharded.transactions import ShardedTransactions
from millpond.transports.url import Url

COMPARED = (1, 2, 4)
SIMULATED = (1, 4, 16, 64, 256)
TROUBLES = ("dead", "silent", "slow", "hot")
WITHIN = 0.15
OTHERS = 0.95
SLOTS = 1_000
"""Messages that a worker holds at most."""
_SLOW = 100
"""The calls of a slow shard take so many times longer."""
_SOMEWHAT_SLOW = (5, 10, 20)
"""The same, without a bar: a claim waits for such a shard, because its answer comes soon."""
_WARM_UP = 2.0
"""Virtual seconds before the trouble begins."""
_LET_GO = 0.1
"""Seconds after which the outcomes that wait for a shard take no slots: its handlers have ended."""
_LOAD = 0.6
"""Share of the largest rate that is published, where one shard is hot."""


# --- a worker ---------------------------------------------------------------------------------------


class _Settling:
    """A loop for each shard, as a worker has them: one call at a time, with all outcomes that wait."""

    def __init__(self, store: ShardedStore, slots: int) -> None:
        self._store = store
        self._slots = slots
        self._left: dict[str | None, list[Receipt]] = {}
        self._under_way: dict[str | None, tuple[int, float]] = {}
        self._tasks: dict[str | None, asyncio.Task[None]] = {}
        self._changed = asyncio.Event()

    def add(self, claims: Sequence[Claim]) -> None:
        for claim in claims:
            self._left.setdefault(claim.receipt.shard, []).append(claim.receipt)
        for shard in self._left:
            if shard not in self._tasks:
                self._tasks[shard] = asyncio.create_task(self._write(shard))

    async def _write(self, shard: str | None) -> None:
        while receipts := self._left.pop(shard, None):
            self._under_way[shard] = len(receipts), _now()
            while True:
                try:
                    if await self._store.settle([Ack(receipt) for receipt in receipts]):
                        raise RuntimeError("a receipt was refused")
                    break
                except StoreUnavailable:
                    await asyncio.sleep(0.5)
            del self._under_way[shard]
            self._changed.set()
        del self._tasks[shard]

    @property
    def unwritten(self) -> int:
        """Slots of messages whose outcomes wait.

        Those of one shard take no more than its part, and none if it has left them without an answer for a while: a
        worker's handlers end before their outcomes are written.
        """
        found, most = 0, self._slots // len(self._store.members.claimed)
        for shard in self._tasks:
            count, began = self._under_way.get(shard, (0, _now()))
            if _now() - began <= _LET_GO:
                found += min(most, count + len(self._left.get(shard, ())))
        return found

    async def progress(self) -> None:
        self._changed.clear()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._changed.wait(), 0.05)

    async def finish(self) -> None:
        while self._tasks:
            await asyncio.gather(*self._tasks.values())

    async def close(self) -> None:
        """Abandon outcomes that are left."""
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)


async def work(store: ShardedStore, slots: int, count: float = float("inf")) -> None:
    """Claim as many messages as there is room for, and ack them; until there were `count`."""
    settling = _Settling(store, slots)
    presence = await store.workers.join(queues=[QUEUE])
    beating = asyncio.create_task(_beat(presence))
    try:
        while count > 0:
            room = int(min(slots - settling.unwritten, count))
            if room < min(slots // 2, count):
                await settling.progress()
                continue
            try:
                claims = await store.claim([QUEUE], room, LEASE, by_worker=True)
            except StoreUnavailable:
                await asyncio.sleep(0.1)
                continue
            count -= len(claims)
            settling.add(claims)
            if not claims:
                await store.wait([QUEUE], 0.05)
        await settling.finish()
    finally:
        await settling.close()
        beating.cancel()
        await asyncio.wait([beating])
        await presence.leave()


async def _beat(presence: Any) -> None:
    while True:
        await asyncio.sleep(1.0)
        await presence.beat()
        for shard, silence in presence.doubtful.items():
            presence.trust(shard, silence)  # there is no other worker that could have taken its messages


def _now() -> float:
    return asyncio.get_running_loop().time()


# --- virtual ponds ----------------------------------------------------------------------------------


class Pond:
    """Databases that stand in for those of a pond. Each has its own machine, or all share one with the program."""

    def __init__(self, costs: Costs, shards: int, *, cores: int, one_machine: bool) -> None:
        names = [f"s{n}" for n in range(shards)]
        map_ = ShardMap.even("pond", names)
        machine = Machine(cores)
        self.databases = {
            f"postgresql://{name}/stand-in": Database(
                ShardRecord(name, map_), machine if one_machine else Machine(cores), costs
            )
            for name in names
        }
        self._machine = machine if one_machine else Machine(1)

    @property
    def first(self) -> Database:
        """The shard that gets into trouble."""
        return next(iter(self.databases.values()))

    @property
    def others(self) -> list[Database]:
        return list(self.databases.values())[1:]

    async def open(self) -> ShardedStore:
        """A program with its own event loop."""
        program = Program(self._machine)

        async def connect_one(url: Url, **options: Any) -> Any:
            return StandIn(self.databases[url.raw], program)

        return await sharded.connect([Url(url) for url in self.databases], connect_one, ShardedTransactions([]), {})


@dataclass(frozen=True)
class Throughput:
    """Messages a second while the first shard is in trouble."""

    first: float
    others: float
    statements: float
    """Claims of shards for a thousand messages."""

    @property
    def all(self) -> float:
        return self.first + self.others


def simulate(
    costs: Costs,
    shards: int,
    trouble: str = "none",
    *,
    seconds: float = 8.0,
    slots: int = SLOTS,
    rate: float | None = None,
    hot_rate: float | None = None,
    factor: float = _SLOW,
    seed: int = 1,
) -> Throughput:
    """One worker on a pond; after some seconds the first shard that it attends gets into trouble.

    `rate`: messages a second that are published on each shard; without it there is always one more. `factor`: the calls
    of a slow shard take so many times longer.
    """
    random.seed(seed)  # a worker of many shards attends them in a random order

    async def main() -> Throughput:
        pond = Pond(costs, shards, cores=2, one_machine=False)
        for database in pond.databases.values():
            database.backlog, database.rate = (1e12, 0) if rate is None else (0, rate)
        store = await pond.open()
        working = asyncio.create_task(work(store, slots))
        await asyncio.sleep(_WARM_UP)
        first = pond.databases[store.members.claimed[0].url.raw]
        first.refuses, first.silent = trouble == "dead", trouble == "silent"
        first.factor = factor if trouble == "slow" else 1
        if trouble == "hot" and hot_rate is not None:
            first.backlog += hot_rate * seconds
        ours, others = [first], [one for one in pond.databases.values() if one is not first]
        before = [_handled(ours), _handled(others), _claims(ours + others)]
        await asyncio.wait([working], timeout=seconds)
        if working.done():
            working.result()
        after = [_handled(ours), _handled(others), _claims(ours + others)]
        working.cancel()
        await asyncio.wait([working])
        first.silent = False
        await store.close()
        first_did, others_did, claims = (b - a for a, b in zip(before, after, strict=True))
        return Throughput(first_did / seconds, others_did / seconds, 1_000 * claims / max(1, first_did + others_did))

    return virtual_time.run(main)


def _handled(databases: Sequence[Database]) -> int:
    return sum(one.handled for one in databases)


def _claims(databases: Sequence[Database]) -> int:
    return sum(one.calls["claim"] for one in databases)


def in_trouble(costs: Costs, shards: int, trouble: str, sound: Throughput, **options: Any) -> tuple[Throughput, float]:
    """The throughput with one shard in trouble, and the rate of the others against that without trouble."""
    if trouble != "hot":
        found = simulate(costs, shards, trouble, **options)
        return found, found.others / sound.others
    rate = _LOAD * sound.all / min(shards, AT_ONCE)
    calm = simulate(costs, shards, rate=rate, **options)
    found = simulate(costs, shards, trouble, rate=rate, hot_rate=sound.all, **options)
    return found, found.others / calm.others


# --- the comparison ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Load:
    """The work of the comparison."""

    messages: int = 30_000
    call: int = 1_000
    """Messages in a call of publish."""
    slots: int = SLOTS
    sizes: tuple[int, int] = (100, 500)
    """Messages in the calls whose times are measured."""
    rounds: int = 3


async def publish_and_drain(store: ShardedStore, load: Load) -> dict[str, float]:
    """Messages a second."""
    began = _now()
    for at in range(0, load.messages, load.call):
        keys = range(at, min(at + load.call, load.messages))
        await store.publish([Message(queue=QUEUE, payload=PAYLOAD, key=f"key-{n}") for n in keys])
    published = _now()
    await work(store, load.slots, load.messages)
    return {"publish": load.messages / (published - began), "drain": load.messages / (_now() - published)}


@asynccontextmanager
async def real_pond(server: Server, shards: int) -> AsyncIterator[ShardedStore]:
    """A pond of new databases of one server. One database is a pond of one shard here."""
    async with databases(server, ONE_SHARD if shards == 1 else shards) as urls:
        store = await open_pond(urls)
        try:
            await publish_and_drain(store, Load(messages=200, call=50, slots=50))  # connections, prepared statements
            yield store
        finally:
            await store.close()


async def measure_costs(server: Server, load: Load) -> Costs:
    """Service times on one shard, one call after the other, for two sizes of calls."""
    found: dict[str, list[Times]] = {"publish": [], "claim": [], "settle": []}
    async with real_pond(server, 1) as store:
        presence = await store.workers.join(queues=[QUEUE])
        for size in load.sizes:
            calls = max(4, load.messages // 2 // size)
            claims: list[list[Claim]] = []

            async def publish(size: int = size) -> None:
                await store.publish([Message(queue=QUEUE, payload=PAYLOAD, key=f"key-{n}") for n in range(size)])

            async def claim(size: int = size, claims: list[list[Claim]] = claims) -> None:
                claims.append(await store.claim([QUEUE], size, LEASE, by_worker=True))

            async def settle(claims: list[list[Claim]] = claims) -> None:
                await store.settle([Ack(one.receipt) for one in claims.pop()])

            for verb, call in (("publish", publish), ("claim", claim), ("settle", settle)):
                found[verb].append(await _times(server, call, calls))
        await presence.leave()
    return {verb: _line(times, load.sizes) for verb, times in found.items()}


async def _times(server: Server, call: Callable[[], Awaitable[None]], calls: int) -> Times:
    began, client, servers = time.perf_counter(), time.process_time(), server.cpu()
    for _ in range(calls):
        await call()
    client, servers = time.process_time() - client, server.cpu() - servers
    rest = max(0.0, time.perf_counter() - began - client - servers)
    return Times(client / calls, servers / calls, rest / calls)


def _line(times: Sequence[Times], sizes: tuple[int, int]) -> Line:
    fixed, each = [], []
    for small, large in zip(*map(_parts, times), strict=True):
        slope = max(0.0, (large - small) / (sizes[1] - sizes[0]))
        each.append(slope)
        fixed.append(max(0.0, small - slope * sizes[0]))
    return Line(Times(*fixed), Times(*each))


def medians(found: Sequence[Costs]) -> Costs:
    def median(parts: Sequence[Times]) -> Times:
        return Times(*(statistics.median(part) for part in zip(*map(_parts, parts), strict=True)))

    return {
        verb: Line(median([one[verb].fixed for one in found]), median([one[verb].each for one in found]))
        for verb in found[0]
    }


def _parts(times: Times) -> tuple[float, float, float]:
    return times.client, times.server, times.rest


@dataclass(frozen=True)
class Comparison:
    shards: int
    verb: str
    real: float
    """Messages a second."""
    simulated: float

    @property
    def ratio(self) -> float:
        return self.simulated / self.real


async def measure(server: Server, load: Load) -> tuple[Costs, dict[tuple[int, str], float]]:
    """Service times, and the rates of real ponds; in alternation. Medians of the rounds."""
    costs: list[Costs] = []
    rates: dict[tuple[int, str], list[float]] = {}
    for _ in range(load.rounds):
        costs.append(await measure_costs(server, load))
        for shards in COMPARED:
            async with real_pond(server, shards) as store:
                for verb, rate in (await publish_and_drain(store, load)).items():
                    rates.setdefault((shards, verb), []).append(rate)
    return medians(costs), {key: statistics.median(found) for key, found in rates.items()}


def compare(costs: Costs, rates: dict[tuple[int, str], float], load: Load) -> list[Comparison]:
    """The same work in virtual time: program and databases share the cores of one machine."""
    found = []
    for shards in COMPARED:

        async def main(shards: int = shards) -> dict[str, float]:
            store = await Pond(costs, shards, cores=os.cpu_count() or 1, one_machine=True).open()
            simulated = await publish_and_drain(store, load)
            await store.close()
            return simulated

        simulated = virtual_time.run(main)
        found += [Comparison(shards, verb, rates[shards, verb], rate) for verb, rate in simulated.items()]
    return found


# --- the command ------------------------------------------------------------------------------------


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.simulation", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer messages and shards")
    options = parser.parse_args()
    load = Load(messages=10_000, rounds=1) if options.quick else Load()
    server = PostgresDatabase()
    try:
        costs, rates = asyncio.run(measure(server, load))
    finally:
        server.close()
    for verb, line in costs.items():
        fixed, each = ("/".join(f"{1e6 * part:.1f}" for part in _parts(one)) for one in (line.fixed, line.each))
        print(f"{verb:8} client/server/rest in us: {fixed} a call, {each} a message")
    failed = False
    for one in compare(costs, rates, load):
        met = abs(one.ratio - 1) <= WITHIN
        failed |= not met
        print(
            f"{'✓' if met else '✗'} {one.shards} databases, {one.verb:7} real {one.real:9,.0f}/s  simulated "
            f"{one.simulated:9,.0f}/s  ratio {one.ratio:.2f}"
        )
    for shards in (1, 4, 16) if options.quick else SIMULATED:
        sound = simulate(costs, shards)
        print(f"  {shards:3} shards         {sound.all:9,.0f}/s  {sound.statements:.1f} claims for 1,000 messages")
        for trouble in TROUBLES if shards > 1 else ():
            found, share = in_trouble(costs, shards, trouble, sound)
            met = share >= OTHERS
            failed |= not met
            print(
                f"{'✓' if met else '✗'} {shards:3} shards, 1 {trouble:6} {found.all:9,.0f}/s  others "
                f"{found.others:9,.0f}/s = {share:.2f} of theirs without it"
            )
        for factor in _SOMEWHAT_SLOW if shards > 1 else ():
            found, share = in_trouble(costs, shards, "slow", sound, factor=factor)
            print(
                f"  {shards:3} shards, 1 x{factor:<5} {found.all:9,.0f}/s  others "
                f"{found.others:9,.0f}/s = {share:.2f}, no bar"
            )
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
