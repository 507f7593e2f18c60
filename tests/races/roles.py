"""Roles of the processes in the races. Run as `python -m tests.races.roles <role> <arguments as JSON>`."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import random
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any
from uuid import UUID

import millpond
from millpond import Ack, Claim, Message, Nack, Transport
from millpond.seam.workers import Presence
from tests.file_clock import FileClock

Role = Callable[..., Awaitable[None]]
ROLES: dict[str, Role] = {}


def role(function: Role) -> Role:
    ROLES[function.__name__] = function
    return function


def send(**facts: Any) -> None:
    print(json.dumps(facts), flush=True)


class Inbox:
    """Lines that the test sends."""

    def __init__(self) -> None:
        self._reader: asyncio.StreamReader | None = None

    async def receive(self) -> str:
        if self._reader is None:
            self._reader = asyncio.StreamReader()
            protocol = asyncio.StreamReaderProtocol(self._reader)
            await asyncio.get_running_loop().connect_read_pipe(lambda: protocol, sys.stdin)
        return (await self._reader.readline()).decode().strip()

    async def ready(self) -> None:
        send(ready=True)
        await self.receive()

    @contextlib.asynccontextmanager
    async def until_received(self) -> AsyncIterator[asyncio.Task[str]]:
        """A task that is done once the test has sent a line."""
        task = asyncio.create_task(self.receive())
        yield task
        task.cancel()


async def connect(url: str, clock: str | None = None) -> Transport:
    options: dict[str, Any] = {} if clock is None else {"clock": FileClock(Path(clock))}
    # A busy machine may pause a process for seconds, even while it holds the write lock of a SQLite file.
    return await millpond.connect(url, busy_timeout=40, **options)


def ids_of(claims: list[Claim]) -> list[str]:
    return [str(claim.receipt.id) for claim in claims]


def acks(claims: list[Claim]) -> list[Ack]:
    return [Ack(claim.receipt) for claim in claims]


@contextlib.asynccontextmanager
async def beating(presence: Presence) -> AsyncIterator[list[bool]]:
    """Beat as a worker does; the list of results."""
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
async def claimer(inbox: Inbox, url: str, number: int, queue: str, batch: int) -> None:
    """Claim and ack until the queue is empty."""
    store = await connect(url)
    await inbox.ready()
    ids: list[str] = []
    refused = 0
    while claims := await store.claim([queue], batch):
        ids += ids_of(claims)
        refused += len(await store.settle(acks(claims)))
    send(ids=ids, refused=refused)
    await store.close()


@role
async def consumer(
    inbox: Inbox, url: str, number: int, queue: str, batch: int, watch: str | None = None, pause: float = 0.0
) -> None:
    """Claim and ack until stopped, and nack some; report a claim of the watched id."""
    store = await connect(url)
    await inbox.ready()
    done: list[str] = []
    async with inbox.until_received() as stop:
        while not stop.done():
            claims = await store.claim([queue], batch)
            now = time.monotonic()
            if watch is not None and watch in ids_of(claims):
                send(met=watch, at=now, full=len(claims) == batch)
            nacked = [c for c in claims if watch is None and c.attempts == 0 and random.random() < 0.1]
            acked = [c for c in claims if c not in nacked]
            refused = await store.settle([*acks(acked), *(Nack(c.receipt, error="again") for c in nacked)])
            assert not refused, refused
            done += ids_of(acked)
            if not claims:
                await store.wait([queue], 0.05)
            await asyncio.sleep(pause)
    send(done=done)
    await store.close()


@role
async def holder(
    inbox: Inbox,
    url: str,
    number: int,
    queue: str,
    count: int,
    lease: float,
    join: bool,
    ahead: bool = False,
    stop: bool = False,
    by_worker: bool = False,
    dead_after: float = 2.0,
    clock: str | None = None,
) -> None:
    """A worker that claims, beats and reaps until stopped; then it acks its claims. `stop`: it announces its stop."""
    store = await connect(url, clock)
    async with contextlib.AsyncExitStack() as stack:
        beats: list[bool] = []
        if join:
            presence = await store.workers.join(f"holder {number}", dead_after=dead_after)
            if stop:
                presence.announce_stop()
                await presence.beat()
            beats = await stack.enter_async_context(beating(presence))
        claims = await store.claim([queue], count, lease, ahead=ahead, by_worker=by_worker)
        send(held=len(claims), deliveries=sorted({c.deliveries for c in claims}))
        reaped = 0
        async with inbox.until_received() as stop:
            while not stop.done():
                await asyncio.wait([stop], timeout=1)
                with contextlib.suppress(millpond.StoreUnavailable):
                    reaped += await store.workers.reap() if join and not stop.done() else 0
        refused = await store.settle(acks(claims))
        send(refused=len(refused), reaped=reaped, beats=beats.count(True), missed=beats.count(False))
    await store.close()


# --- publishing -----------------------------------------------------------------------------------------


@role
async def publisher(inbox: Inbox, url: str, number: int, queue: str, kind: str, pause: float = 0.0) -> None:
    """Publish until stopped."""
    store = await connect(url)
    await inbox.ready()
    new: list[str] = []
    offered = 0
    shared = random.Random(7)  # the same ids in every process
    async with inbox.until_received() as stop:
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
    send(new=new, offered=offered)
    await store.close()


@role
async def given_publisher(inbox: Inbox, url: str, number: int, queue: str, rounds: list[list[str]]) -> None:
    """Publish rounds of given ids, one round per line from the test, and report which were new."""
    store = await connect(url)
    await inbox.ready()
    for ids in rounds:
        published = await store.publish([Message(queue=queue, payload=b"x", id=UUID(id_)) for id_ in ids])
        send(new=[str(p.id) for p in published if p.new])
        await inbox.receive()
    await store.close()


# --- reaping, purging, migrating ------------------------------------------------------------------------


@role
async def reaper(inbox: Inbox, url: str, number: int, pause: float = 0.0) -> None:
    store = await connect(url)
    await inbox.ready()
    reaped = 0
    async with inbox.until_received() as stop:
        while not stop.done():
            reaped += await store.workers.reap()
            await asyncio.sleep(pause)
    send(reaped=reaped)
    await store.close()


@role
async def purger(inbox: Inbox, url: str, number: int, pause: float) -> None:
    store = await connect(url)
    await inbox.ready()
    purged = 0
    async with inbox.until_received() as stop:
        while not stop.done():
            purged += await store.operations.purge(older_than=0.2)
            await asyncio.sleep(pause)
    send(purged=purged)
    await store.close()


_OFTEN = 4


@role
async def flaky(inbox: Inbox, url: str, number: int, queue: str) -> None:
    """Claim; abandon some at once with almost no lease, and settle the others, which must not be refused.

    None is abandoned any more once a message has lapsed often: it would wait for up to a minute each time.
    """
    store = await connect(url)
    await inbox.ready()
    abandoned, often, settled, refused = 0, 0, [], 0
    async with inbox.until_received() as stop:
        while not stop.done():
            if often < _OFTEN and random.random() < 0.5:
                lapsing = await store.claim([queue], 5, 0.001)
                abandoned += len(lapsing)
                often = max([often, *(claim.deliveries for claim in lapsing)])
            else:
                claims = await store.claim([queue], 5, 60)
                await asyncio.sleep(0.005)  # long enough for a reaper that does not check again
                stale = await store.settle(acks(claims))
                refused += len(stale)
                settled += [str(c.receipt.id) for c in claims if c.receipt not in stale]
    send(abandoned=abandoned, settled=settled, refused=refused)
    await store.close()


@role
async def migrator(inbox: Inbox, url: str, number: int) -> None:
    await inbox.ready()
    store = await millpond.connect(url, migrate=True)
    send(published=len(await store.publish([Message(queue="q", payload=b"x")])))
    await store.close()


def main() -> None:
    name, args = sys.argv[1:]
    logging.getLogger("millpond").setLevel(logging.ERROR)  # SQLite's version causes a warning in every process
    asyncio.run(ROLES[name](Inbox(), **json.loads(args)))  # type: ignore[arg-type]


if __name__ == "__main__":
    main()
