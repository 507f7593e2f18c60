"""Many clients of one server: `python -m bench.server_load STREAMS CLIENTS RATE SECONDS`.

Stdin has a line with the addresses of HTTP and gRPC. It publishes RATE messages a second to each of two queues, one for
the gRPC streams and one for the HTTP clients. It prints `ready`, `over` after SECONDS, and then the result: errors, and
the number of messages of each client.
"""

import asyncio
import contextlib
import json
import sys
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Any

import grpc

from bench.http_client import HttpClient
from bench.rpc_client import RpcClient
from bench.side import now

STREAMS, HTTP = "streams", "http"
_TICK = 0.1
_UNSETTLED = 10
_LIMIT = 10
_WAIT = 20
_LEASE = 60
_FINISH = 60.0
"""Maximum seconds for the messages that are left at the end."""


class Load:
    """Clients that consume, and the messages that each has acked."""

    def __init__(self, url: str, address: str) -> None:
        self._url = url
        self._address = address
        self.published: Counter[str] = Counter()
        self.shares: dict[str, Counter[int]] = {STREAMS: Counter(), HTTP: Counter()}
        self.errors: Counter[str] = Counter()
        self.ended = False
        self.done = asyncio.Event()
        """All messages were acked after the last one was published."""
        self._is_complete = False

    async def publish(self, rate: float, seconds: float) -> None:
        began = now()
        async with HttpClient(self._url) as client:
            for tick in range(round(seconds / _TICK)):
                await asyncio.sleep(max(0.0, began + tick * _TICK - now()))
                number = round(rate * _TICK * (tick + 1)) - round(rate * _TICK * tick)
                for queue in (STREAMS, HTTP):
                    messages = [{"body": {"n": n, "pad": "x" * 150}} for n in range(number)]
                    await client.post(f"/queues/{queue}/messages/batch", {"messages": messages})
                    self.published[queue] += number
        self._is_complete = True
        self._add(STREAMS, 0, 0)

    async def stream(self, client: int) -> None:
        rpc = RpcClient(self._address)
        call = rpc.stream(STREAMS, _UNSETTLED)
        try:
            while True:
                reply = await call.read()
                if reply is grpc.aio.EOF:
                    raise RuntimeError("the stream ended")
                if await rpc.ack([message.receipt for message in reply.messages]):
                    raise RuntimeError("a receipt was refused")
                self._add(STREAMS, client, len(reply.messages))
        finally:
            call.cancel()
            await rpc.close()

    async def claim(self, client: int) -> None:
        async with HttpClient(self._url) as http:
            while not self.ended:
                request = {"queues": [HTTP], "limit": _LIMIT, "lease": _LEASE, "wait": _WAIT}
                claims = (await http.post("/claims", request))["claims"]
                if claims:
                    receipts = [claim["receipt"] for claim in claims]
                    if (await http.post("/claims/ack", {"receipts": receipts}))["refused"]:
                        raise RuntimeError("a receipt was refused")
                    self._add(HTTP, client, len(claims))

    async def without_end(self, work: Callable[[int], Awaitable[None]], client: int) -> None:
        """Go on after an error, which is counted."""
        while not self.ended:
            try:
                await work(client)
            except Exception as e:
                self.errors[f"{type(e).__name__}: {e}"[:200]] += 1
                await asyncio.sleep(1)

    def _add(self, queue: str, client: int, number: int) -> None:
        self.shares[queue][client] += number
        if self._is_complete and all(self.shares[q].total() >= self.published[q] for q in (STREAMS, HTTP)):
            self.done.set()

    def report(self, streams: int, clients: int) -> dict[str, Any]:
        return {
            "published": sum(self.published.values()),
            "handled": sum(shares.total() for shares in self.shares.values()),
            "errors": dict(self.errors),
            STREAMS: [self.shares[STREAMS][n] for n in range(streams)],
            HTTP: [self.shares[HTTP][n] for n in range(clients)],
        }


async def main(streams: int, clients: int, rate: float, seconds: float) -> None:
    load = Load(*sys.stdin.readline().split())
    tasks = [asyncio.create_task(load.without_end(load.stream, n)) for n in range(streams)]
    tasks += [asyncio.create_task(load.without_end(load.claim, n)) for n in range(clients)]
    print("ready", flush=True)
    await load.publish(rate, seconds)
    print("over", flush=True)
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(load.done.wait(), _FINISH)
    load.ended = True
    report = load.report(streams, clients)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    print(json.dumps(report), flush=True)


if __name__ == "__main__":
    asyncio.run(main(int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]), float(sys.argv[4])))
