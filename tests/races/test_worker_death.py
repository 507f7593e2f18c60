"""Messages of a killed worker are given back in about two seconds, not after their lease."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import pytest

import millpond
from millpond import Ack, Claim, Message, State, Transport
from millpond.clock import SECOND
from millpond.transports.database.options import StoreOptions
from millpond.transports.url import Url
from servers import PgBouncer, Postgres, Proxy
from tests.races.processes import Actors, report
from tests.races.roles import beating
from tests.waiting import until

pytestmark = pytest.mark.slow

COUNT = 2_500


@pytest.mark.parametrize(
    "by_worker", [True, pytest.param(False, marks=pytest.mark.long_on_servers)], ids=["held", "own leases"]
)
async def test_kill_9(url: str, store: Transport, actors: Actors, by_worker: bool) -> None:
    """Claims of the dead worker are given back; those of the living one, and of callers without presence, are not."""
    await store.publish([Message(queue="q", payload=b"x") for _ in range(COUNT + 20)])
    people = await actors.start("holder", url=url, number=0, queue="q", count=10, lease=600, join=False)
    assert (await people.receive())["held"] == 10
    joined = {"url": url, "queue": "q", "lease": 600, "join": True, "by_worker": by_worker}
    living = await actors.start("holder", number=1, count=10, **joined)
    assert (await living.receive())["held"] == 10
    worker = await actors.start("holder", number=2, count=COUNT, **joined)
    assert (await worker.receive())["held"] == COUNT
    presence = await store.workers.join("survivor")
    async with beating(presence) as beats:
        steady_at = time.monotonic() + 3
        while time.monotonic() < steady_at:
            assert await store.workers.reap() == 0
            await asyncio.sleep(0.5)
        await worker.kill()
        await people.kill()
        killed_at = time.monotonic()
        claims: list[Claim] = []

        async def all_are_back() -> bool:
            claims.extend(await store.claim(["q"], COUNT))
            return len(claims) >= COUNT

        async def tidied() -> bool:
            """No row or lock of the dead worker is left, although a reaper was interrupted."""
            await store.workers.reap()
            return len(lock_files(url)) == (2 if url.startswith("sqlite") else 0)

        reaping = asyncio.create_task(until(store.workers.reap, every=1))  # as a worker does; the living one reaps too
        await until(all_are_back)
        seconds = time.monotonic() - killed_at
        reaping.cancel()
        await until(tidied)
        assert beats.count(False) < max(2, len(beats) / 10), "on a busy machine one may be late"
    living.send("settle")
    assert (await living.receive())["refused"] == 0
    assert await store.claim(["q"], COUNT) == []
    assert len(claims) == COUNT
    assert all(c.redelivered and (c.deliveries, c.attempts, c.crashes) == (2, 0, 1) for c in claims)
    assert await store.settle([Ack(c.receipt) for c in claims]) == []
    report("kill -9 of a worker", url, messages=COUNT, faults=2, seconds=round(seconds, 2))
    assert seconds < 15  # about two seconds on a quiet machine, not the 600 of the lease
    await presence.leave()
    await living.ends()
    assert not lock_files(url)


async def test_crashes_are_of_started_messages_of_workers_that_did_not_stop(
    url: str, store: Transport, actors: Actors
) -> None:
    """A message claimed ahead counts as started from its second delivery without a result on: poison never escapes."""
    await store.publish([Message(queue=queue, payload=b"x") for queue in ("started", "ahead", "stopped")])
    presence = await store.workers.join("survivor")

    async def kill_holders() -> dict[str, tuple[int, int]]:
        workers = []
        for number, queue in enumerate(("started", "ahead", "stopped")):
            options = {"ahead": queue == "ahead", "stop": queue == "stopped", "join": True, "by_worker": True}
            worker = await actors.start("holder", url=url, number=number, queue=queue, count=1, lease=600, **options)
            assert (await worker.receive())["held"] == 1
            workers.append(worker)
        await asyncio.gather(*(worker.kill() for worker in workers))

        async def back() -> bool:
            await store.workers.reap()
            return {row.state for row in await store.operations.browse()} == {State.PENDING}

        await until(back, every=0.2)
        return {row.queue: (row.deliveries, row.crashes) for row in await store.operations.browse()}

    async with beating(presence):
        assert await kill_holders() == {"started": (1, 1), "ahead": (1, 0), "stopped": (1, 0)}
        assert await kill_holders() == {"started": (2, 2), "ahead": (2, 1), "stopped": (2, 0)}
        wait = {row.queue: row.due_us - row.created_us for row in await store.operations.browse()}
    assert wait["ahead"] == wait["stopped"] == 0 and wait["started"] > SECOND
    await presence.leave()


def lock_files(url: str) -> list[Path]:
    """Lock files of workers on SQLite."""
    return list(Path(url.removeprefix("sqlite:///")).parent.glob("*-worker-*")) if url.startswith("sqlite") else []


async def test_a_pooler_turns_the_lock_off(postgres_server: Postgres, postgres_url: str) -> None:
    """Behind a transaction pooler a lock does not belong to its worker; leases alone decide then."""
    database = postgres_url.rpartition("/")[2]
    direct = await millpond.connect(postgres_url, migrate=True)
    with PgBouncer(postgres_server) as pooler:
        pooled = await millpond.connect(pooler.url_of(database), pooler=True)
        declared = await pooled.workers.join("declared")
        # This one has no option for the pooler: it finds out when its session changes.
        unaware = await millpond.connect(pooler.url_of(database), pooler=True)
        unaware.runner.options = StoreOptions()  # type: ignore[attr-defined]
        finds_out = await unaware.workers.join("finds out")

        def by_lock() -> dict[str, int]:
            with postgres_server.connect(database) as connection:
                return dict(connection.execute("SELECT name, by_lock FROM millpond_worker").fetchall())

        assert by_lock() == {"declared": 0, "finds out": 1}

        async def found_out() -> bool:
            # Concurrent clients make the pooler switch sessions.
            await asyncio.gather(*(pooled.claim(["q"], 1) for _ in range(8)), finds_out.beat(), declared.beat())
            return by_lock()["finds out"] == 0

        await until(found_out)
        await direct.publish([Message(queue="q", payload=b"x")])
        (claim,) = await unaware.claim(["q"], 1, 60)
        await direct.workers.join("reaper")
        report("transaction pooler", postgres_url, messages=1, faults=1)
        assert await pooled.settle([Ack(claim.receipt)]) == []
        for store in (pooled, unaware, direct):
            await store.close()


async def test_a_lock_file_that_was_tidied_away_is_made_again(sqlite_url: str) -> None:
    store = await millpond.connect(sqlite_url)
    presence = await store.workers.join()
    folder = Path(sqlite_url.removeprefix("sqlite:///")).parent
    (file,) = folder.glob("*-worker-*")
    file.unlink()
    assert await presence.beat()
    assert file.exists()
    await store.close()
    assert not file.exists()


async def test_a_cut_connection_is_noticed_and_the_lock_retaken(server_url: str, server_store: Transport) -> None:
    """While the connection is cut, beats return False and claims carry no lock mark; afterwards all is as before."""
    parts = Url(server_url)
    with Proxy(parts.port or 0) as proxy:
        store: Transport = await millpond.connect(proxy.url(server_url))  # type: ignore[assignment]
        presence = await store.workers.join("cut off")
        assert await presence.beat()
        proxy.refuse()
        proxy.cut()
        assert not await presence.beat()
        assert not await presence.beat()
        proxy.accept()
        assert await until(presence.beat)
        assert await presence.beat()
        proxy.black_hole()  # no packet announces that the connection is gone
        assert not await presence.beat()
        proxy.resume()
        assert await until(presence.beat)
        await store.close()
    async with beating(await server_store.workers.join("left")):
        assert await server_store.workers.reap() == 0
    report("cut connection", server_url, messages=0, faults=2)


async def test_another_thread_may_beat(url: str, store: Transport) -> None:
    """A connection belongs to one loop: the lock moves to the loop that beats."""
    presence = await store.workers.join("two loops")
    await store.publish([Message(queue="q", payload=b"x")])

    async def beats() -> list[bool]:
        answers = [await presence.beat() for _ in range(3)]
        await asyncio.sleep(0.1)  # the first loop closes its session meanwhile
        answers += [await presence.beat() for _ in range(3)]
        claims = asyncio.run_coroutine_threadsafe(store.claim(["q"], 1), loop)
        assert len(await asyncio.wrap_future(claims)) == 1
        await presence.leave()
        return answers

    loop = asyncio.get_running_loop()
    assert await asyncio.to_thread(asyncio.run, beats()) == [True] * 6
