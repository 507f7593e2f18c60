"""Group commit: concurrent publishers against a bulk publish, and one publisher against none of it."""

import asyncio
import statistics
from functools import partial

from bench.databases import Database
from bench.measure import Measurement, Work, ratio, single, take_turns
from bench.scenario import Scenario, fresh
from bench.side import PAYLOAD, QUEUE, now
from bench.sizes import Sizes
from millpond import Message, Transport, connect
from millpond.transports.database.messages.groups import Tries

PUBLISHERS = {64: 0.3, 200: 0.5}
"""Number of concurrent publishers, and the least share of the rate of a bulk publish."""


async def group_commit(scenario: Scenario, database: Database, sizes: Sizes) -> list[Measurement]:
    """Publishers that wait for each of their messages, in alternation with a bulk publish."""
    count = sizes.bulk * max(1, sizes.bulks // 2)
    took: dict[str, list[float]] = {}
    alone: list[float] = []
    for _ in range(sizes.rounds):
        async with fresh(database) as url:
            store = await connect(url, migrate=True)
            await _publishers(store, 8, 64)  # connections and prepared statements
            turns: dict[str, Work] = {"bulk": partial(_bulk, store, count, sizes.bulk)}
            turns |= {str(n): partial(_publishers, store, n, count) for n in PUBLISHERS}
            seconds = await take_turns(turns, 1)
            alone.append(await _alone(store, sizes.single))
            await store.close()
        for name, parts in seconds.items():
            took.setdefault(name, []).extend(parts)
    return [
        *(
            ratio(
                f"{scenario.name}-{n}",
                f"{n} concurrent publishers",
                f"publish {sizes.bulk:,} a call",
                took[str(n)],
                took["bulk"],
                count,
                at_least=bar if scenario.bar is not None else None,
            )
            for n, bar in PUBLISHERS.items()
        ),
        single(
            f"{scenario.name}-alone",
            "p50 of a single publisher",
            "without groups",
            statistics.median(alone),
            "times",
            at_most=1.05 if scenario.bar is not None else None,
        ),
    ]


def _message() -> Message:
    return Message(queue=QUEUE, payload=PAYLOAD)


async def _bulk(store: Transport, count: int, size: int) -> float:
    began = now()
    for _ in range(count // size):
        await store.publish([_message() for _ in range(size)])
    return now() - began


async def _publishers(store: Transport, publishers: int, count: int) -> float:
    async def publish(number: int) -> None:
        for _ in range(number):
            await store.publish([_message()])

    began = now()
    each, rest = divmod(count, publishers)
    await asyncio.gather(*(publish(each + (n < rest)) for n in range(publishers)))
    return now() - began


async def _alone(store: Transport, count: int) -> float:
    """The median time of one publish, divided by that of the same publish past the groups."""
    grouped, direct = [], []
    groups = store._groups  # type: ignore[attr-defined]
    bypass = _Bypass(groups)
    for _ in range(count):
        for way, found in ((groups, grouped), (bypass, direct)):
            store._groups = way  # type: ignore[attr-defined]
            began = now()
            await store.publish([_message()])
            found.append(now() - began)
    store._groups = groups  # type: ignore[attr-defined]
    return statistics.median(grouped) / statistics.median(direct)


class _Bypass:
    """Publishes without groups, as before they existed."""

    def __init__(self, groups: object) -> None:
        self._write = groups._write  # type: ignore[attr-defined]

    async def publish(self, draft: object) -> object:
        return (await self._write([draft], Tries()))[0]
