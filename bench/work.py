"""One process that handles messages: `python -m bench.work KIND COUNT BATCH`, with the URL on stdin.

It says `ready`, waits for a line, and prints when its first and its last message were handled, by a clock that all
processes share. Kinds: `worker`, a no-op handler; `slow`, one that waits 5 ms, 200 at once; `coroutines`, the same
200 without any queue; `store`, claims and acks without handlers; `raw`, the same by hand.
"""

import asyncio
import json
import sys
import time
from collections.abc import Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

from bench.raw_postgres import RawPostgres
from bench.side import QUEUE, now
from bench.store_side import open_store
from millpond import Millpond

AT_ONCE = 200
_START, _IDLE = 2.0, 0.25
"""Seconds until the first message at most, and without another after which everything is handled."""


class Watch:
    """When the first and the last message were handled."""

    def __init__(self) -> None:
        self.count = 0
        self.first = self.last = 0.0
        self.cpu = 0.0

    def handled(self) -> None:
        self.last = now()
        if self.count == 0:
            self.began(self.last)
        self.count += 1

    def began(self, at: float) -> None:
        self.first, self.cpu = at, -time.process_time()

    def answer(self) -> str:
        cpu = self.cpu + time.process_time() if self.count else 0.0
        return json.dumps({"count": self.count, "first": self.first, "last": self.last, "cpu": cpu})


async def no_op(body: dict) -> None:
    """What a worker costs by itself."""


async def five_ms(body: dict) -> None:
    await asyncio.sleep(0.005)


@asynccontextmanager
async def worker(url: str, watch: Watch, handler: Callable[[dict], Awaitable[None]], **options: Any) -> Any:
    pond = Millpond(url)

    @pond.subscriber(QUEUE, **options)
    async def handle(body: dict) -> None:
        await handler(body)
        watch.handled()

    async def work() -> None:
        running = asyncio.create_task(pond.run(signals=False))
        give_up_at = now() + _START
        count = 0
        while not running.done() and (watch.count > count or (count == 0 and now() < give_up_at)):
            count = watch.count
            await asyncio.wait([running], timeout=_IDLE)
        pond.stop()
        await running

    async with pond:
        yield work


@asynccontextmanager
async def coroutines(watch: Watch, count: int) -> Any:
    left = count

    async def one_after_the_other() -> None:
        nonlocal left
        while left > 0:
            left -= 1
            await five_ms({})
            watch.handled()

    async def work() -> None:
        watch.began(now())
        await asyncio.gather(*(one_after_the_other() for _ in range(AT_ONCE)))

    yield work


@asynccontextmanager
async def drained(side: Any, watch: Watch, count: int, batch: int) -> Any:
    async def work() -> None:
        watch.began(now())
        await side.drain(count, batch)
        watch.count, watch.last = count, now()

    yield work
    await side.close()


async def main(kind: str, count: int, batch: int) -> None:
    url = sys.stdin.readline().strip()
    watch = Watch()
    match kind:
        case "worker":
            doing = worker(url, watch, no_op)
        case "slow":
            doing = worker(url, watch, five_ms, max_workers=AT_ONCE)
        case "coroutines":
            doing = coroutines(watch, count)
        case "store":
            doing = drained(await open_store(url), watch, count, batch)
        case "raw":
            doing = drained(await RawPostgres.open(url, ""), watch, count, batch)
        case _:
            raise SystemExit(f"no such kind: {kind}")
    async with doing as work:
        print("ready", flush=True)
        sys.stdin.readline()
        await work()
    print(watch.answer(), flush=True)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3])))
