"""The work of every contestant: handle `count` messages of 200 bytes, and print the time.

Run as `python run_NAME.py drain|latency COUNT < url` in its own process and virtual environment; prints one line of
JSON. Time runs from the first handler call to the last; start-up and last acks do not count.
"""

import asyncio
import json
import sys
import time
from collections.abc import Awaitable, Callable

BODY = {"x": "a" * 191}  # 200 bytes as JSON
RATE = 20.0


class Contest:
    def __init__(self, count: int) -> None:
        self.count = count
        self.seen = 0
        self.done = asyncio.Event()
        self.latencies: list[float] = []
        self._first = self._last = 0.0

    def handled(self, published_at: float | None = None) -> None:
        """Record that a message has reached its handler."""
        now = time.perf_counter()
        if published_at is not None:
            self.latencies.append(time.time() - published_at)
        if self.seen == 0:
            self._first = now
        self.seen += 1
        if self.seen == self.count:
            self._last = now
            self.done.set()

    @property
    def seconds(self) -> float:
        return self._last - self._first

    async def publish_slowly(self, publish: Callable[[dict[str, object]], Awaitable[object]]) -> None:
        """Publish twenty messages a second, each with its publishing time."""
        for _ in range(self.count):
            began = time.perf_counter()
            await publish({"at": time.time(), "x": "a" * 150})
            await asyncio.sleep(max(0.0, 1 / RATE - (time.perf_counter() - began)))


def main(drain: Callable[[str, Contest], Awaitable[None]], latency: Callable[[str, Contest], Awaitable[None]]) -> None:
    mode, count = sys.argv[1], int(sys.argv[2])
    url = sys.stdin.read().strip()  # not as an argument: it contains a password

    async def run() -> Contest:
        contest = Contest(count)
        await (drain if mode == "drain" else latency)(url, contest)
        return contest

    contest = asyncio.run(run())
    result = {"seconds": contest.seconds} if mode == "drain" else {"latencies": contest.latencies}
    print(json.dumps({"count": contest.seen, **result}), flush=True)
