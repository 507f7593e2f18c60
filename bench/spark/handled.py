"""Timed handlers: in a worker, in a worker on Spark, in a micro-batch, or without a queue.

Each process writes a line to a file: the number of handled messages, and the times of the first and the last by a
shared clock.
"""

import asyncio
import json
import sys
from collections.abc import Awaitable, Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import msgspec

from bench.side import QUEUE, now
from bench.work import Watch, five_ms, no_op
from millpond import Millpond

AT_ONCE = 16
"""Concurrent handlers of 5 ms in each of two processes: about 5,500 messages a second, an eighth of the database's
maximum."""
HANDLERS: dict[str, Callable[[dict], Awaitable[None]]] = {"no-op": no_op, "slow": five_ms}
FILE = "handled"


def pond_at(url: str, folder: str, kind: str) -> Millpond:
    """A pond for a module that a measurement writes, because executors can only import modules."""
    pond, watch, handler = Millpond(url), Watch(), HANDLERS[kind]

    @pond.subscriber(QUEUE, **({"max_workers": AT_ONCE} if kind == "slow" else {}))
    async def handle(body: dict) -> None:
        await handler(body)
        watch.handled()

    @pond.on_stop
    def write() -> None:
        leave(folder, watch)

    return pond


def batches(folder: str, kind: str) -> Callable[[Iterable[Any]], Iterator[Any]]:
    """The same handlers in a task of a micro-batch, for `mapInArrow`."""

    def handle(tables: Iterable[Any]) -> Iterator[Any]:
        watch = Watch()
        for table in tables:
            payloads = iter(table["payload"].to_pylist())
            asyncio.run(_all(payloads, HANDLERS[kind], watch))
            yield table.select(["id"])
        if watch.count:
            leave(folder, watch)

    return handle


async def _all(payloads: Iterator[bytes], handler: Callable[[dict], Awaitable[None]], watch: Watch) -> None:
    async def one_after_the_other() -> None:
        for payload in payloads:
            await handler(msgspec.json.decode(payload))
            watch.handled()

    await asyncio.gather(*(one_after_the_other() for _ in range(AT_ONCE)))


def leave(folder: str, watch: Watch) -> None:
    with Path(folder, FILE).open("a") as file:
        file.write(watch.answer() + "\n")


def seconds(folder: Path, count: int) -> float:
    """Seconds from the first handled message to the last, over all processes."""
    answers = [json.loads(line) for line in (folder / FILE).read_text().splitlines()]
    handled = sum(answer["count"] for answer in answers)
    if handled != count:
        raise RuntimeError(f"{handled} of {count} messages were handled")
    worked = [answer for answer in answers if answer["count"]]
    return max(answer["last"] for answer in worked) - min(answer["first"] for answer in worked)


async def coroutines(folder: str, count: int) -> None:
    """Run the handlers without a queue."""
    watch = Watch()
    watch.began(now())
    await _all(iter([b"{}"] * count), five_ms, watch)
    leave(folder, watch)


if __name__ == "__main__":
    asyncio.run(coroutines(sys.argv[1], int(sys.argv[2])))
