"""One of three shards is killed, cut off or silent under load, or its clock differs: the others keep their rate.

Nothing is lost, and no repeat is unflagged. Workers have default options.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any
from uuid import UUID

import pytest

import millpond
from millpond import Delivery, Message, Millpond, State, transports
from millpond.clock import SECOND, SystemClock
from millpond.errors import MillpondError
from servers import Postgres, Proxy
from tests.faults.report import Line, report
from tests.waiting import until

pytestmark = [pytest.mark.slow, pytest.mark.server]

NAMES = ["a", "b", "c"]
EVERY = 0.05
"""Seconds between two publishes on each shard."""
BATCH = 5
SHARED_MACHINE = 0.2
"""Least part of the rate in the short form, beside other tests: the shard goes on. The long form demands 0.95."""


class Load:
    """Publishers of each shard at a steady pace, and two workers that record every delivery."""

    def __init__(self, urls: list[str]) -> None:
        self.urls = urls
        self.known: dict[UUID, str] = {}
        """Messages whose publish returned, with their shards."""
        self.unknown = 0
        self.handled: dict[UUID, list[bool]] = {}
        """For each message that was handled: which of its deliveries were flagged as repeats."""
        self.times: list[tuple[float, str]] = []
        self._keys: dict[str, str] = {}
        self._stop = asyncio.Event()

    @asynccontextmanager
    async def running(self) -> AsyncIterator[Load]:
        async with AsyncExitStack() as stack:
            self.store: Any = await millpond.connect(self.urls, reconnect_timeout=1)
            stack.push_async_callback(self.store.close)
            place = self.store.members.map.place
            self._keys = {name: next(k for n in range(999) if place(k := f"k{n}", b"") == name) for name in NAMES}
            for _ in range(2):
                await stack.enter_async_context(self._worker())
            publishers = [asyncio.create_task(self._publish(name)) for name in NAMES]
            try:
                yield self
            finally:
                self._stop.set()
                await asyncio.gather(*publishers)

    @asynccontextmanager
    async def _worker(self) -> AsyncIterator[None]:
        pond = Millpond(self.urls)

        @pond.subscriber("q", max_workers=16, lease=30)
        async def handle(body: str, delivery: Delivery) -> None:
            self.handled.setdefault(delivery.id, []).append(delivery.redelivered)
            self.times.append((time.monotonic(), body))

        running = asyncio.create_task(pond.run(signals=False))
        try:
            yield
        finally:
            pond.stop()
            await running
            await pond.close()

    async def _publish(self, name: str) -> None:
        while not self._stop.is_set():
            batch = [Message(queue="q", payload=f'"{name}"'.encode(), key=self._keys[name]) for _ in range(BATCH)]
            try:
                self.known |= {one.id: name for one in await self.store.publish(batch)}
            except MillpondError:
                self.unknown += BATCH
            await asyncio.sleep(EVERY)

    def key(self, name: str) -> str:
        """A key that belongs to the shard, by the first map."""
        return self._keys[name]

    async def rate(self, seconds: float) -> Counter[str]:
        """Messages handled from now on, by shard."""
        began = len(self.times)
        await asyncio.sleep(seconds)
        return Counter(name for _, name in self.times[began:])

    async def stopped(self) -> None:
        """Publish no more, and wait until everything is handled and settled."""
        self._stop.set()

        async def done() -> bool:
            (stats,) = await self.store.operations.count(["q"], exact=True)
            counts = stats.counts
            live = sum(counts.get(state, 0) for state in (State.PENDING, State.PROCESSING, State.RETRYABLE))
            return not stats.missing and not live and self.known.keys() <= self.handled.keys()

        await until(done, "all messages to be settled", within=120)


async def judge(
    load: Load,
    scenario: str,
    before: Counter[str],
    during: Counter[str],
    faults: int,
    long: bool,
    *,
    others: Sequence[str] = ("a", "c"),
) -> None:
    """`others`: the shards that have no part in the fault."""
    await load.stopped()
    lost = len(load.known.keys() - load.handled.keys())
    repeats = [flags for flags in load.handled.values() if len(flags) > 1]
    unflagged = sum(not flag for flags in repeats for flag in flags[1:])
    rate = min(during[name] / before[name] for name in others)
    report(
        Line(
            scenario,
            "postgresql",
            len(load.known),
            faults,
            lost=lost,
            doubled=len(repeats),
            unflagged=unflagged,
            rate=rate,
            more={"unknown": load.unknown},
        ),
        {"postgresql": "3 private servers"},
    )
    assert (lost, unflagged) == (0, 0)
    assert rate >= (0.95 if long else SHARED_MACHINE)


@asynccontextmanager
async def three_shards(**options: Any) -> AsyncIterator[tuple[list[Postgres], Proxy, list[str]]]:
    """Three private servers; the shard `b` is behind a proxy."""
    async with AsyncExitStack() as stack:
        servers = [stack.enter_context(Postgres(shared_buffers="16MB", max_connections=80)) for _ in NAMES]
        proxy = stack.enter_context(Proxy(servers[1].port))
        urls = [server.url for server in servers]
        urls[1] = proxy.url(urls[1])
        await transports.init_shards(urls, names=NAMES, migrate=True, **options)
        yield servers, proxy, urls


async def kill(server: Postgres, proxy: Proxy, away: Callable[[], Awaitable[Any]]) -> Any:
    await asyncio.to_thread(server.kill)
    try:
        return await away()
    finally:
        await asyncio.to_thread(server.start)


async def cut(server: Postgres, proxy: Proxy, away: Callable[[], Awaitable[Any]]) -> Any:
    proxy.refuse()
    proxy.cut()
    try:
        return await away()
    finally:
        proxy.accept()


async def silence(server: Postgres, proxy: Proxy, away: Callable[[], Awaitable[Any]]) -> Any:
    proxy.black_hole()
    try:
        return await away()
    finally:
        proxy.resume()


@pytest.mark.parametrize("fault", [kill, *(pytest.param(fault, marks=pytest.mark.long) for fault in (cut, silence))])
async def test_one_shard_of_three_is_away_under_load(fault: Any, long: bool) -> None:
    window, times = (60.0, 5) if long else (6.0, 1)
    async with three_shards() as (servers, proxy, urls), Load(urls).running() as load:
        await until(lambda: {name for _, name in load.times} == set(NAMES))
        before = await load.rate(window)
        during: Counter[str] = Counter()
        for _ in range(times):
            during += await fault(servers[1], proxy, lambda: load.rate(window))
            sent = len(load.times)
            await until(lambda: "b" in {name for _, name in load.times[sent:]}, "the shard's return", within=60)  # noqa: B023
        during = Counter({name: count // times for name, count in during.items()})
        await judge(load, f"shard: {fault.__name__}", before, during, times, long)


class Ahead:
    """The clock of a database that differs by some seconds."""

    def __init__(self, seconds: float) -> None:
        self._us = round(seconds * SECOND)

    def now(self) -> int:
        return SystemClock().now() + self._us


async def test_clocks_of_shards_differ_by_a_minute(monkeypatch: pytest.MonkeyPatch, long: bool) -> None:
    """A message is due, and a lease ends, by the clock of its own shard."""
    window = 60.0 if long else 5.0
    connect_shard = transports._connect_shard
    async with three_shards() as (_, _, urls):
        async with Load(urls).running() as load:
            await until(lambda: {name for _, name in load.times} == set(NAMES))
            before = await load.rate(window)
            await load.stopped()
        clocks = {url: Ahead(60.0 * (n - 1)) for n, url in enumerate(urls)}

        async def connect(url: Any, **options: Any) -> Any:
            return await connect_shard(url, **{**options, "clock": clocks[url.raw]})

        monkeypatch.setattr(transports, "_connect_shard", connect)
        async with Load(urls).running() as load:
            await until(lambda: {name for _, name in load.times} == set(NAMES))
            during = await load.rate(window)
            await judge(load, "shard: clocks", before, during, 1, long)
            assert during["b"] / before["b"] >= (0.95 if long else SHARED_MACHINE)
