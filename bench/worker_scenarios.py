"""Measurements of the worker: against its store, against itself, and against other queues on PostgreSQL."""

import statistics
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import chain

from bench.contestants import MILLPOND, contest, work
from bench.databases import Database
from bench.measure import Measurement, Work, ratio, take_turns
from bench.scenario import Scenario, fresh
from bench.sizes import Sizes
from bench.store_side import open_store
from millpond.table_prefix import TABLE_PREFIX

AT_LEAST = {"pgqueuer": 3.0, "procrastinate": 30.0, "outbox": 5.0, "sqlbroker": 10.0}
"""Minimum ratio of Millpond's rate to that of each peer."""
AT_THE_LIMIT = 0.8
"""From this fraction of raw SQL's speed on the database is the limit. It is also the bar of the store alone."""


class Working:
    """A drain of a filled database by processes of one kind; records their use of the processors."""

    def __init__(self, database: Database, sizes: Sizes, kind: str, processes: int = 1) -> None:
        self._database = database
        self._sizes = sizes
        self._kind = kind
        self._processes = processes
        self.server_cpus: list[float] = []
        self.own_cpus: list[float] = []

    async def __call__(self) -> float:
        database, count = self._database, self._sizes.worker
        async with fresh(database) as url:
            await (await open_store(url)).close()
            if self._kind != "coroutines":
                await database.fill(url, TABLE_PREFIX, 1, count)
                await database.tidy(url)
            before = database.cpu()
            answers = await work(self._kind, count, self._sizes.batch, url, self._processes)
            server = database.cpu() - before
        took = max(a["last"] for a in answers) - min(a["first"] for a in answers if a["count"])
        self.server_cpus.append(server / took)
        self.own_cpus.append(sum(a["cpu"] for a in answers) / took)
        return took

    def facts(self) -> dict[str, float]:
        return {
            "processors for the server": round(statistics.median(self.server_cpus), 2),
            "processors for the processes": round(statistics.median(self.own_cpus), 2),
        }


async def against_store(scenario: Scenario, database: Database, sizes: Sizes) -> list[Measurement]:
    """Measure the cost of claims, handlers and the gathering of outcomes on top of the store."""
    worker, store = Working(database, sizes, "worker"), Working(database, sizes, "store")
    took = await take_turns({"worker": worker, "store": store}, sizes.rounds)
    what, against = "drain by a worker, no-op async handler", "the store without handlers"
    result = ratio(scenario.name, what, against, took["worker"], took["store"], sizes.worker, at_least=scenario.bar)
    return [result.with_facts(worker.facts())]


async def two_workers(scenario: Scenario, database: Database, sizes: Sizes) -> list[Measurement]:
    """Measure the gain of a second process.

    If both together are nearly as fast as two processes that do the same by hand, the database is the limit, and there
    is no bar.
    """
    works = {
        "one": Working(database, sizes, "worker"),
        "two": Working(database, sizes, "worker", 2),
        "raw": Working(database, sizes, "raw", 2),
    }
    took = await take_turns(works, sizes.rounds)
    count, name, what = sizes.worker, scenario.name, "drain by two worker processes"
    limit = ratio(f"{name}-limit", what, "raw SQL by two processes", took["two"], took["raw"], count)
    bar = None if limit.value >= AT_THE_LIMIT else scenario.bar
    gain = ratio(name, what, "one", took["two"], took["one"], count, at_least=bar)
    return [gain.with_facts(works["two"].facts()), limit.with_facts(works["raw"].facts())]


async def slow_handlers(scenario: Scenario, database: Database, sizes: Sizes) -> list[Measurement]:
    """Measure handlers that wait 5 ms, 200 at once, against the same coroutines without a queue.

    Where the database's own limit is lower than that, compare with the limit.
    """
    kinds = ("slow", "coroutines", "store")
    works = {kind: Working(database, sizes, kind) for kind in kinds}
    took = await take_turns(works, sizes.rounds)
    limit = [max(pair) for pair in zip(took["coroutines"], took["store"], strict=True)]
    count = sizes.worker
    what = "async handlers of 5 ms, 200 at once"
    slow = took["slow"]
    plain = ratio(f"{scenario.name}-plain", what, "the same coroutines", slow, took["coroutines"], count)
    limited = ratio(
        scenario.name, what, "the same coroutines, or the store's drain", slow, limit, count, at_least=scenario.bar
    )
    return [limited.with_facts(works["slow"].facts()), plain]


async def drain_peers(scenario: Scenario, database: Database, sizes: Sizes) -> list[Measurement]:
    """Measure one worker process of each queue, at the best settings that were found for it.

    Their rates differ too much for equal numbers of messages; seconds are therefore per message.
    """

    def turn(name: str, count: int) -> Work:
        async def drain() -> float:
            async with fresh(database) as url:
                return (await contest(name, "drain", count, url))["seconds"] / count

        return drain

    counts = {MILLPOND: sizes.worker, **sizes.peers}
    took = await take_turns({name: turn(name, count) for name, count in counts.items()}, sizes.rounds)
    what = "drain by one worker process"
    return [
        ratio(f"{scenario.name}-{peer}", what, peer, took[MILLPOND], took[peer], 1, at_least=AT_LEAST[peer]).with_facts(
            {"messages": sizes.worker, f"messages of {peer}": sizes.peers[peer]}
        )
        for peer in sizes.peers
    ]


async def latency_peers(scenario: Scenario, database: Database, sizes: Sizes) -> list[Measurement]:
    """Measure the time from publish to handler, on an idle worker, at 20 messages a second."""
    found: dict[str, list[list[float]]] = {}

    async def turn(name: str) -> float:
        async with fresh(database) as url:
            latencies = (await contest(name, "latency", sizes.latency, url))["latencies"]
        del latencies[: len(latencies) // 10]  # programs prepare statements and open connections with the first ones
        found.setdefault(name, []).append([1000 * latency for latency in latencies])
        return statistics.median(latencies)

    await take_turns({name: partial(turn, name) for name in (MILLPOND, *sizes.peers)}, sizes.latency_rounds)
    return [_against_best(scenario, percent, found) for percent in (50, 99)]


def _against_best(scenario: Scenario, percent: int, found: Mapping[str, Sequence[Sequence[float]]]) -> Measurement:
    """The ratio to the best peer, over the messages of all rounds.

    In a single round p99 would depend on one slow write to the disk.
    """
    overall = {name: _percentile(list(chain.from_iterable(rounds)), percent) for name, rounds in found.items()}
    best = min((name for name in overall if name != MILLPOND), key=overall.__getitem__)
    pairs = zip(found[MILLPOND], found[best], strict=True)
    ratios = [_percentile(ours, percent) / _percentile(theirs, percent) for ours, theirs in pairs]
    return Measurement(
        name=f"{scenario.name}-p{percent}",
        what=f"publish to handler at 20/s, p{percent}: {overall[MILLPOND]:.1f} ms",
        against=f"{best}, the best peer: {overall[best]:.1f} ms",
        value=overall[MILLPOND] / overall[best],
        unit="ratio",
        low=min(ratios),
        high=max(ratios),
        at_most=scenario.bar,
        facts={
            "messages": sum(map(len, found[MILLPOND])),
            **{f"ms of {name}": round(ms, 2) for name, ms in overall.items()},
        },
    )


def _percentile(values: Sequence[float], percent: int) -> float:
    return sorted(values)[min(len(values) - 1, len(values) * percent // 100)]


WORKER_SCENARIOS = [
    Scenario("postgres", "worker", against_store, 0.6),
    Scenario("postgres", "two-workers", two_workers, 1.2),
    Scenario("postgres", "slow-handlers", slow_handlers, 0.8),
    Scenario("postgres", "peers-drain", drain_peers, peers=True),
    Scenario("postgres", "peers-latency", latency_peers, 1.0, peers=True),
]
