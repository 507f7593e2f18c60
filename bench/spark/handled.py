"""Handlers that are timed wherever they run: in a worker, in a worker below Spark, in a micro-batch, or by themselves.

Each process leaves a line in a file: how many it handled, and when the first and the last, by a clock that all share.
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
"""Handlers of 5 ms that each of two processes runs at once: about 5,500 messages a second, an eighth of what the
database can do."""
HANDLERS: dict[str, Callable[[dict], Awaitable[None]]] = {"no-op": no_op, "slow": five_ms}
FILE = "handled"


def pond_at(url: str, folder: str, kind: str) -> Millpond:
    """For a module that a measurement writes, since executors know nothing but modules."""
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
    """From the first handled message to the last, wherever they were."""
    answers = [json.loads(line) for line in (folder / FILE).read_text().splitlines()]
    handled = sum(answer["count"] for answer in answers)
    if handled != count:
        raise RuntimeError(f"{handled} of {count} messages were handled")
    worked = [answer for answer in answers if answer["count"]]
    return max(answer["last"] for answer in worked) - min(answer["first"] for answer in worked)


async def coroutines(folder: str, count: int) -> None:
    """Without any queue."""
    watch = Watch()
    watch.began(now())
    await _all(iter([b"{}"] * count), five_ms, watch)
    leave(folder, watch)


if __name__ == "__main__":
    asyncio.run(coroutines(sys.argv[1], int(sys.argv[2])))
