"""What the processes of the races do. Run as `python -m tests.races.roles <role> <arguments as JSON>`."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import random
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any
from uuid import UUID

import millpond
from millpond import Ack, Claim, Message, Nack, Store
from millpond.transport import Presence

Role = Callable[..., Awaitable[None]]
ROLES: dict[str, Role] = {}


def role(function: Role) -> Role:
    ROLES[function.__name__] = function
    return function


def say(**facts: Any) -> None:
    print(json.dumps(facts), flush=True)


class Ear:
    """Reads the words that the test tells."""

    def __init__(self) -> None:
        self._reader: asyncio.StreamReader | None = None

    async def hear(self) -> str:
        if self._reader is None:
            self._reader = asyncio.StreamReader()
            protocol = asyncio.StreamReaderProtocol(self._reader)
            await asyncio.get_running_loop().connect_read_pipe(lambda: protocol, sys.stdin)
        return (await self._reader.readline()).decode().strip()

    async def ready(self) -> None:
        say(ready=True)
        await self.hear()

    @contextlib.asynccontextmanager
    async def until_told(self) -> AsyncIterator[asyncio.Task[str]]:
        """A task that is done once the test has said a word."""
        task = asyncio.create_task(self.hear())
        yield task
        task.cancel()


async def connect(url: str) -> Store:
    # A machine that runs all this may stop for seconds, also with a file's one lock in hand.
    return await millpond.connect(url, busy_timeout=40)  # type: ignore[return-value]


def ids_of(claims: list[Claim]) -> list[str]:
    return [str(claim.receipt.id) for claim in claims]


def acks(claims: list[Claim]) -> list[Ack]:
    return [Ack(claim.receipt) for claim in claims]


@contextlib.asynccontextmanager
async def beating(presence: Presence) -> AsyncIterator[list[bool]]:
    """Beats as a worker does; the answers since the last look."""
    beats: list[bool] = []

    async def beat() -> None:
        while True:
            beats.append(await presence.beat())
            await asyncio.sleep(0.5)

    task = asyncio.create_task(beat())
    yield beats
    task.cancel()


# --- claiming -------------------------------------------------------------------------------------------


@role
async def claimer(ear: Ear, url: str, number: int, queue: str, batch: int) -> None:
    """Claims and acks until there is nothing left."""
    store = await connect(url)
    await ear.ready()
    ids: list[str] = []
    refused = 0
    while claims := await store.claim([queue], batch):
        ids += ids_of(claims)
        refused += len(await store.settle(acks(claims)))
    say(ids=ids, refused=refused)
    await store.close()


@role
async def consumer(
    ear: Ear, url: str, number: int, queue: str, batch: int, watch: str | None = None, pause: float = 0.0
) -> None:
    """Claims and acks until told to stop, nacking some; says when it meets the watched id."""
    store = await connect(url)
    await ear.ready()
    done: list[str] = []
    async with ear.until_told() as stop:
        while not stop.done():
            claims = await store.claim([queue], batch)
            now = time.monotonic()
            if watch is not None and watch in ids_of(claims):
                say(met=watch, at=now, full=len(claims) == batch)
            nacked = [c for c in claims if watch is None and c.attempts == 0 and random.random() < 0.1]
            acked = [c for c in claims if c not in nacked]
            refused = await store.settle([*acks(acked), *(Nack(c.receipt, error="again") for c in nacked)])
            assert not refused, refused
            done += ids_of(acked)
            if not claims:
                await store.wait([queue], 0.05)
            await asyncio.sleep(pause)
    say(done=done)
    await store.close()


@role
async def holder(ear: Ear, url: str, number: int, queue: str, count: int, lease: float, join: bool) -> None:
    """A worker that claims, beats and reaps until told; then it acks what it holds."""
    store = await connect(url)
    async with contextlib.AsyncExitStack() as stack:
        beats: list[bool] = []
        if join:
            beats = await stack.enter_async_context(beating(await store.join(f"holder {number}")))
        claims = await store.claim([queue], count, lease)
        say(held=len(claims), deliveries=sorted({c.deliveries for c in claims}))
        reaped = 0
        async with ear.until_told() as told:
            while not told.done():
                await asyncio.wait([told], timeout=1)
                with contextlib.suppress(millpond.StoreUnavailable):
                    reaped += await store.reap() if join and not told.done() else 0
        refused = await store.settle(acks(claims))
        say(refused=len(refused), reaped=reaped, beats=beats.count(True), missed=beats.count(False))
    await store.close()


# --- publishing -----------------------------------------------------------------------------------------


@role
async def publisher(ear: Ear, url: str, number: int, queue: str, kind: str, pause: float = 0.0) -> None:
    """Publishes until told to stop."""
    store = await connect(url)
    await ear.ready()
    new: list[str] = []
    offered = 0
    shared = random.Random(7)  # the same ids in every process
    async with ear.until_told() as stop:
        while not stop.done():
            if kind == "single":
                messages = [Message(queue=queue, payload=b"single")]
            elif kind == "bulk":
                messages = [Message(queue=queue, payload=b"bulk") for _ in range(200)]
            else:
                chosen = [UUID(int=shared.getrandbits(128), version=4) for _ in range(20)]
                random.shuffle(chosen)
                messages = [Message(queue=queue, payload=b"given", id=id_) for id_ in chosen]
            offered += len(messages)
            new += [str(p.id) for p in await store.publish(messages) if p.new]
            await asyncio.sleep(pause)
    say(new=new, offered=offered)
    await store.close()


@role
async def given_publisher(ear: Ear, url: str, number: int, queue: str, rounds: list[list[str]]) -> None:
    """Publishes rounds of given ids, each at a word, and says which were new."""
    store = await connect(url)
    await ear.ready()
    for ids in rounds:
        published = await store.publish([Message(queue=queue, payload=b"x", id=UUID(id_)) for id_ in ids])
        say(new=[str(p.id) for p in published if p.new])
        await ear.hear()
    await store.close()


# --- reaping, purging, migrating ------------------------------------------------------------------------


@role
async def reaper(ear: Ear, url: str, number: int, pause: float = 0.0) -> None:
    store = await connect(url)
    await ear.ready()
    reaped = 0
    async with ear.until_told() as stop:
        while not stop.done():
            reaped += await store.reap()
            await asyncio.sleep(pause)
    say(reaped=reaped)
    await store.close()


@role
async def purger(ear: Ear, url: str, number: int, pause: float) -> None:
    store = await connect(url)
    await ear.ready()
    purged = 0
    async with ear.until_told() as stop:
        while not stop.done():
            purged += await store.purge(older_than=0.2)
            await asyncio.sleep(pause)
    say(purged=purged)
    await store.close()


@role
async def flaky(ear: Ear, url: str, number: int, queue: str) -> None:
    """Claims; abandons some at once with next to no lease, and settles the others, which must be its own."""
    store = await connect(url)
    await ear.ready()
    abandoned, settled, refused = 0, [], 0
    async with ear.until_told() as stop:
        while not stop.done():
            if random.random() < 0.5:
                abandoned += len(await store.claim([queue], 5, 0.001, max_crashes=None))
            else:
                claims = await store.claim([queue], 5, 60, max_crashes=None)
                await asyncio.sleep(0.005)  # long enough for a reaper that does not look again
                stale = await store.settle(acks(claims))
                refused += len(stale)
                settled += [str(c.receipt.id) for c in claims if c.receipt not in stale]
    say(abandoned=abandoned, settled=settled, refused=refused)
    await store.close()


@role
async def migrator(ear: Ear, url: str, number: int) -> None:
    await ear.ready()
    store = await millpond.connect(url, migrate=True)
    say(published=len(await store.publish([Message(queue="q", payload=b"x")])))
    await store.close()


def main() -> None:
    name, args = sys.argv[1:]
    logging.getLogger("millpond").setLevel(logging.ERROR)  # a warning of SQLite's version, once a process
    asyncio.run(ROLES[name](Ear(), **json.loads(args)))  # type: ignore[arg-type]


if __name__ == "__main__":
    main()
