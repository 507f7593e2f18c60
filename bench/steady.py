"""One process of a steady load: `python -m bench.steady publish RATE SECONDS`, or `work SECONDS`; the URL is on stdin.

Both print `ready` and wait for a line with the time of the start, by a clock that all processes share. The publisher
prints the number of its messages. The worker prints a line after each part of the time, then waits for a line with the
number of messages to expect, and prints the latencies of each part. A latency counts from the time at which a message
was to be published, so a publisher that is late makes it longer.
"""

import asyncio
import json
import sys
from array import array
from typing import Any

from bench.side import QUEUE, now
from millpond import Millpond
from millpond.telemetry import Event, MessagesClaimed

TICK = 0.005
_CALLS = 8
"""Calls of publish at the same time."""
PARTS = 5
"""Number of parts of a short run; a long one has parts of a minute."""
_FINISH = 60.0
"""Maximum seconds for the messages that are left at the end."""


def part_of(seconds: float) -> float:
    """Seconds of one part of a run."""
    return min(60.0, seconds / PARTS)


async def publish(url: str, rate: float, seconds: float) -> None:
    """Publish a few messages at each tick, each call beside those before it, as several programs would."""
    async with Millpond(url) as pond:
        began = await _start()
        sent, calls = 0, set[asyncio.Task[Any]]()
        for tick in range(round(seconds / TICK)):
            at = began + tick * TICK
            await asyncio.sleep(max(0.0, at - now()))
            if len(calls) == _CALLS:
                await asyncio.wait(calls, return_when=asyncio.FIRST_COMPLETED)
            upto = round(rate * (tick + 1) * TICK)
            bodies = [{"at": at, "n": n, "pad": "x" * 150} for n in range(sent, upto)]
            sent = upto
            call = asyncio.create_task(pond.publish_many(QUEUE, bodies))
            calls.add(call)
            call.add_done_callback(calls.discard)
        await asyncio.gather(*calls)
    print(json.dumps({"published": sent}), flush=True)


class Handled:
    """Latencies of each part, and the numbers of the messages."""

    def __init__(self, part: float) -> None:
        self.part = part
        self.began = 0.0
        self.latencies: dict[int, array[float]] = {}
        self.numbers: set[int] = set()
        self.twice = 0
        self.claims = 0

    def add(self, body: dict[str, Any]) -> None:
        at, n = body["at"], body["n"]
        if n in self.numbers:
            self.twice += 1
        self.numbers.add(n)
        self.latencies.setdefault(int((at - self.began) / self.part), array("d")).append(now() - at)

    def claimed(self, event: Event) -> None:
        self.claims += 1

    def report(self) -> dict[str, Any]:
        parts = [sorted(self.latencies[part]) for part in sorted(self.latencies)]
        return {
            "handled": len(self.numbers),
            "twice": self.twice,
            "p50": [1000 * _percentile(part, 50) for part in parts],
            "p99": [1000 * _percentile(part, 99) for part in parts],
            "p99 of all": 1000 * _percentile(sorted(latency for part in parts for latency in part), 99),
        }


async def work(url: str, seconds: float) -> None:
    handled = Handled(part_of(seconds))
    pond = Millpond(url)
    pond.telemetry.subscribe(handled.claimed, MessagesClaimed)

    @pond.subscriber(QUEUE)
    async def handle(body: dict) -> None:
        handled.add(body)

    async with pond:
        running = asyncio.create_task(pond.run(signals=False))
        handled.began = await _start()
        for part in range(round(seconds / handled.part)):
            await asyncio.sleep(max(0.0, handled.began + (part + 1) * handled.part - now()))
            print(json.dumps({"claims": handled.claims}), flush=True)
        expected = int(await asyncio.to_thread(sys.stdin.readline))
        give_up_at = now() + _FINISH
        while len(handled.numbers) < expected and not running.done() and now() < give_up_at:
            await asyncio.wait([running], timeout=0.1)
        pond.stop()
        await running
    print(json.dumps(handled.report()), flush=True)


async def _start() -> float:
    print("ready", flush=True)
    return float(await asyncio.to_thread(sys.stdin.readline))


def _percentile(values: list[float], percent: int) -> float:
    return values[min(len(values) - 1, len(values) * percent // 100)]


if __name__ == "__main__":
    kind, *numbers = sys.argv[1:]
    role = {"publish": publish, "work": work}[kind]
    asyncio.run(role(sys.stdin.readline().strip(), *map(float, numbers)))
