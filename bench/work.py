"""One process that handles messages: `python -m bench.work KIND COUNT BATCH`, with the URL on stdin.

It prints `ready`, waits for a line, and prints the times of its first and its last handled message, by a clock that
all processes share. Kinds: `worker`, a no-op handler; `slow`, one that waits 5 ms, 200 at once; `coroutines`, the same
200 without any queue; `store`, claims and acks without handlers; `raw`, the same by hand; `stream`, one gRPC stream,
and `http`, claims and acks over HTTP, both with the address of a server on stdin.
"""

import asyncio
import json
import sys
import time
from collections.abc import Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

from bench.http_client import HttpClient
from bench.raw_postgres import RawPostgres
from bench.rpc_client import RpcClient
from bench.side import LEASE, QUEUE, now
from bench.store_side import open_store
from millpond import Millpond

AT_ONCE = 200
_UNSETTLED = 2_000
"""Messages of one stream that are not acked yet."""
_REQUESTS = 4
"""Connections of one program that claims over HTTP."""
_START, _IDLE = 2.0, 0.25
"""Maximum seconds until the first message; seconds without a message after which the work is done."""


class Watch:
    """Number of handled messages, and the times of the first and the last."""

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
    """Do nothing: the time is that of the worker alone."""


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

    async def run_handlers() -> None:
        nonlocal left
        while left > 0:
            left -= 1
            await five_ms({})
            watch.handled()

    async def work() -> None:
        watch.began(now())
        await asyncio.gather(*(run_handlers() for _ in range(AT_ONCE)))

    yield work


@asynccontextmanager
async def drain_by(side: Any, watch: Watch, count: int, batch: int) -> Any:
    async def work() -> None:
        watch.began(now())
        await side.drain(count, batch)
        watch.count, watch.last = count, now()

    yield work
    await side.close()


@asynccontextmanager
async def stream(address: str, watch: Watch, count: int) -> Any:
    """The messages of one stream; those of each reply are acked while the next ones come."""
    client = RpcClient(address)

    async def ack(receipts: list[str]) -> None:
        if await client.ack(receipts):
            raise RuntimeError("a receipt was refused")
        watch.count, watch.last = watch.count + len(receipts), now()

    async def work() -> None:
        call = client.stream(QUEUE, _UNSETTLED)
        received, acks = 0, list[asyncio.Task[None]]()
        while received < count:
            messages = (await call.read()).messages
            if not received:
                watch.began(now())
            received += len(messages)
            acks.append(asyncio.create_task(ack([message.receipt for message in messages])))
        await asyncio.gather(*acks)
        call.cancel()

    yield work
    await client.close()


@asynccontextmanager
async def http(url: str, watch: Watch, count: int, batch: int) -> Any:
    """Claims and acks of batches over a few connections."""

    async def consume() -> None:
        async with HttpClient(url) as client:
            while watch.count < count:
                request = {"queues": [QUEUE], "limit": batch, "lease": LEASE, "wait": 1}
                claims = (await client.post("/claims", request))["claims"]
                if claims:
                    if not watch.first:
                        watch.began(now())
                    receipts = [claim["receipt"] for claim in claims]
                    if (await client.post("/claims/ack", {"receipts": receipts}))["refused"]:
                        raise RuntimeError("a receipt was refused")
                    watch.count, watch.last = watch.count + len(claims), now()

    async def work() -> None:
        await asyncio.gather(*(consume() for _ in range(_REQUESTS)))

    yield work


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
            doing = drain_by(await open_store(url), watch, count, batch)
        case "raw":
            doing = drain_by(await RawPostgres.open(url, "millpond_"), watch, count, batch)
        case "stream":
            doing = stream(url, watch, count)
        case "http":
            doing = http(url, watch, count, batch)
        case _:
            raise SystemExit(f"no such kind: {kind}")
    async with doing as work:
        print("ready", flush=True)
        sys.stdin.readline()
        await work()
    print(watch.answer(), flush=True)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3])))
