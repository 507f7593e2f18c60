"""The latency of a steady load while another transaction holds its snapshot, minute by minute."""

import asyncio
import json
import os
import sys
from asyncio.subprocess import PIPE, Process
from typing import Any

import asyncpg

from bench.contestants import ROOT
from bench.databases import Database
from bench.measure import Measurement, single
from bench.scenario import Scenario, fresh
from bench.side import now
from bench.sizes import Sizes
from bench.steady import part_of
from bench.store_side import open_store

FLAT = 1.5
"""Maximum of the last minute against the second, for the latency and for the index entries per claim."""
_INDEXES = ("millpond_message_claim", "millpond_message_appeared", "millpond_message_lease")
_ENTRIES = "SELECT sum(idx_tup_read) FROM pg_stat_user_indexes WHERE indexrelname = ANY($1::text[])"


async def held_latency(scenario: Scenario, database: Database, sizes: Sizes) -> list[Measurement]:
    """One publisher and one worker at a steady rate; the snapshot is older than all their messages."""
    rate, seconds = sizes.steady_rate, sizes.steady_seconds
    async with fresh(database) as url:
        await (await open_store(url)).close()
        async with database.hold(url):
            published, entries, report = await _run(url, rate, seconds)
    what = f"{rate:,} messages/s for {_words(seconds)} with a snapshot held"
    p99, part = report["p99"], f"part of {part_of(seconds):g} s"
    facts = {
        "messages": published,
        "handled twice": report["twice"],
        "p50 of each part": [round(ms, 1) for ms in report["p50"]],
        "p99 of each part": [round(ms, 1) for ms in p99],
        "entries per claim of each part": [round(n) for n in entries],
        "load of the machine": round(os.getloadavg()[0], 1),
    }
    done = 100 * report["handled"] / published
    return [
        Measurement(f"{scenario.name}-done", what, "published", done, "%", done, done, at_least=100, facts=facts),
        single(scenario.name, f"publish to handler, p99, {what}", "", report["p99 of all"], "ms", at_most=scenario.bar),
        _flat(f"{scenario.name}-flat", f"p99 of the last {part}", p99),
        _flat(f"{scenario.name}-entries", f"index entries per claim in the last {part}", entries),
    ]


def _flat(name: str, what: str, values: list[float]) -> Measurement:
    value = values[-1] / values[1]
    return Measurement(name, what, "the second", value, "ratio", value, value, at_most=FLAT)


async def _run(url: str, rate: int, seconds: float) -> tuple[int, list[float], dict[str, Any]]:
    """The number of published messages, the index entries per claim of each part, and the worker's report."""
    publisher, worker = await _start(url, "publish", rate, seconds), await _start(url, "work", seconds)
    began = now() + 1.0
    for process in (publisher, worker):
        _send(process, repr(began))
    watching = await asyncpg.connect(url)
    entries, claims = [0], [0]
    try:
        for _ in range(round(seconds / part_of(seconds))):
            claims.append((await _read(worker))["claims"])
            entries.append(int(await watching.fetchval(_ENTRIES, _INDEXES)))
    finally:
        await watching.close()
    published = (await _read(publisher))["published"]
    _send(worker, str(published))
    report = await _read(worker)
    for process in (publisher, worker):
        if await process.wait():
            raise RuntimeError(f"a process of the load ended with {process.returncode}")
    parts = range(len(entries) - 1)
    per_claim = [(entries[n + 1] - entries[n]) / max(1, claims[n + 1] - claims[n]) for n in parts]
    return published, per_claim, report


async def _start(url: str, kind: str, *numbers: float) -> Process:
    command = (sys.executable, "-m", "bench.steady", kind, *map(str, numbers))
    process = await asyncio.create_subprocess_exec(*command, stdin=PIPE, stdout=PIPE, cwd=ROOT)
    _send(process, url)
    assert process.stdout is not None
    if await process.stdout.readline() != b"ready\n":
        raise RuntimeError(f"the process to {kind} did not start")
    return process


def _send(process: Process, line: str) -> None:
    assert process.stdin is not None
    process.stdin.write(f"{line}\n".encode())


async def _read(process: Process) -> dict[str, Any]:
    assert process.stdout is not None
    line = await process.stdout.readline()
    if not line:
        raise RuntimeError(f"a process of the load ended with {await process.wait()}")
    found: dict[str, Any] = json.loads(line)
    return found


def _words(seconds: float) -> str:
    return f"{seconds / 60:g} minutes" if seconds >= 60 else f"{seconds:g} s"
