"""Measurements of `millpond serve`: throughput of its clients, many clients at once, and pages of the dashboard."""

import asyncio
import json
import os
import statistics
import sys
from asyncio.subprocess import PIPE
from collections.abc import Sequence
from typing import Any

from bench.contestants import ROOT, work
from bench.databases import Database
from bench.measure import Measurement, ratio, single, take_turns
from bench.scenario import Scenario, fresh
from bench.served import Served, serving
from bench.server_load import HTTP, STREAMS
from bench.server_pages import server_pages
from bench.sizes import Sizes
from bench.store_side import open_store
from bench.worker_scenarios import Working
from millpond.table_prefix import TABLE_PREFIX
from servers.processes import cpu_of

STREAM_AT_LEAST, HTTP_AT_LEAST = 0.5, 0.3
"""Minimum rate of one gRPC stream, and of claims and acks over HTTP, against that of a worker."""
UNFAIR = 20
"""Maximum percentage by which the share of a client differs from the mean."""
GROWTH = 20
"""Maximum growth of the server's memory in MiB after the first fifth of the time."""
_EVERY = 1.0


class Serving:
    """A drain of a filled database by one program that is a client of a server."""

    def __init__(self, database: Database, sizes: Sizes, kind: str) -> None:
        self._database = database
        self._sizes = sizes
        self._kind = kind
        self.server_cpus: list[float] = []
        self.client_cpus: list[float] = []

    async def __call__(self) -> float:
        count = self._sizes.worker
        async with fresh(self._database) as url:
            await (await open_store(url)).close()
            await self._database.fill(url, TABLE_PREFIX, 1, count)
            await self._database.tidy(url)
            async with serving(url) as server:
                before = cpu_of(server.pid)
                address = server.grpc_address if self._kind == "stream" else server.url
                (answer,) = await work(self._kind, count, self._sizes.batch, address)
                cpu = cpu_of(server.pid) - before
        took = float(answer["last"] - answer["first"])
        self.server_cpus.append(cpu / took)
        self.client_cpus.append(answer["cpu"] / took)
        return took

    def facts(self) -> dict[str, float]:
        return {
            "processors for the server": round(statistics.median(self.server_cpus), 2),
            "processors for the client": round(statistics.median(self.client_cpus), 2),
        }


async def server_drain(scenario: Scenario, database: Database, sizes: Sizes) -> list[Measurement]:
    """One program that consumes by a server, against a worker on the same database."""
    stream, http = Serving(database, sizes, "stream"), Serving(database, sizes, "http")
    worker = Working(database, sizes, "worker")
    took = await take_turns({"stream": stream, "http": http, "worker": worker}, sizes.rounds)
    against, count = "a worker, no-op async handler", sizes.worker
    return [
        ratio(
            f"{scenario.name}-{name}", what, against, took[name], took["worker"], count, at_least=at_least
        ).with_facts(serving.facts())
        for name, serving, what, at_least in (
            ("stream", stream, "drain by one gRPC stream", STREAM_AT_LEAST),
            ("http", http, f"drain over HTTP, batches of {sizes.batch}", HTTP_AT_LEAST),
        )
    ]


async def server_clients(scenario: Scenario, database: Database, sizes: Sizes) -> list[Measurement]:
    """gRPC streams and HTTP clients at once on one server, at a steady rate."""
    (streams, clients), seconds = sizes.clients, sizes.clients_seconds
    async with fresh(database) as url:
        await (await open_store(url)).close()
        async with serving(url) as server:
            report, memory = await _load(server, streams, clients, sizes.clients_rate, seconds)
    what = f"{streams} gRPC streams and {clients} HTTP clients for {seconds / 60:g} minutes"
    facts = {
        "messages": report["published"],
        "memory in MiB": [round(mib) for mib in memory[:: max(1, len(memory) // 10)]],
        "load of the machine": round(os.getloadavg()[0], 1),
    }
    done = 100 * report["handled"] / report["published"]
    errors = sum(report["errors"].values())
    name = scenario.name
    return [
        single(f"{name}-errors", f"errors, {what}", "", errors, "errors", at_most=0, kinds=report["errors"]),
        Measurement(f"{name}-done", what, "published", done, "%", done, done, at_least=100, facts=facts),
        single(
            f"{name}-streams",
            "greatest difference of a stream from the mean",
            "",
            _unfairness(report[STREAMS]),
            "%",
            at_most=UNFAIR,
        ),
        single(
            f"{name}-http",
            "greatest difference of an HTTP client from the mean",
            "",
            _unfairness(report[HTTP]),
            "%",
            at_most=UNFAIR,
        ),
        single(
            f"{name}-memory",
            "growth of the server's memory after a fifth of the time",
            "",
            memory[-1] - memory[len(memory) // 5],
            "MiB",
            at_most=GROWTH,
        ),
    ]


def _unfairness(shares: Sequence[int]) -> float:
    mean = sum(shares) / len(shares)
    return 100 * max(abs(share - mean) for share in shares) / mean


async def _load(
    server: Served, streams: int, clients: int, rate: float, seconds: float
) -> tuple[dict[str, Any], list[float]]:
    """The report of the clients, and the server's memory in MiB while they run."""
    command = (sys.executable, "-m", "bench.server_load", str(streams), str(clients), f"{rate:g}", f"{seconds:g}")
    process = await asyncio.create_subprocess_exec(*command, stdin=PIPE, stdout=PIPE, cwd=ROOT, limit=2**20)
    assert process.stdin is not None and process.stdout is not None
    process.stdin.write(f"{server.url} {server.grpc_address}\n".encode())
    if await process.stdout.readline() != b"ready\n":
        raise RuntimeError("the clients did not start")
    over = asyncio.create_task(process.stdout.readline())
    memory = [resident(server.pid)]
    while not over.done():
        await asyncio.wait([over], timeout=_EVERY)
        memory.append(resident(server.pid))
    report = json.loads(await process.stdout.readline() or "null")
    if await process.wait() or report is None:
        raise RuntimeError(f"the clients ended with {process.returncode}")
    return report, memory


def resident(pid: int) -> float:
    """Resident memory of a process in MiB."""
    with open(f"/proc/{pid}/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20


SERVER_SCENARIOS = [
    Scenario("postgres", "server-drain", server_drain),
    Scenario("postgres", "server-pages", server_pages, 3),
    Scenario("postgres", "server-clients", server_clients),
]
