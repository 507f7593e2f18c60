"""A killed worker's messages come back in about two seconds, not a lease later."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import millpond
from millpond import Ack, Claim, Message, Store
from millpond.transports.database.options import StoreOptions
from millpond.transports.url import Url
from servers import PgBouncer, Postgres, Proxy
from tests.races.processes import Actors, report
from tests.races.roles import beating
from tests.waiting import until

COUNT = 2_500


async def test_kill_9(url: str, store: Store, actors: Actors) -> None:
    """The dead one's claims come back; those of the living, and of people without presence, do not."""
    await store.publish([Message(queue="q", payload=b"x") for _ in range(COUNT + 20)])
    people = await actors.start("holder", url=url, number=0, queue="q", count=10, lease=600, join=False)
    assert (await people.says())["held"] == 10
    living = await actors.start("holder", url=url, number=1, queue="q", count=10, lease=600, join=True)
    assert (await living.says())["held"] == 10
    worker = await actors.start("holder", url=url, number=2, queue="q", count=COUNT, lease=600, join=True)
    assert (await worker.says())["held"] == COUNT
    presence = await store.join("survivor")
    async with beating(presence) as beats:
        steady_at = time.monotonic() + 3
        while time.monotonic() < steady_at:
            assert await store.reap() == 0
            await asyncio.sleep(0.5)
        await worker.kill()
        await people.kill()
        killed_at = time.monotonic()
        claims: list[Claim] = []

        async def all_are_back() -> bool:
            claims.extend(await store.claim(["q"], COUNT))
            return len(claims) >= COUNT

        async def tidied() -> bool:
            """Nothing is left of the dead one, although a reaper was cut short."""
            await store.reap()
            return len(lock_files(url)) == (2 if url.startswith("sqlite") else 0)

        reaping = asyncio.create_task(until(store.reap, every=1))  # as a worker does; the living one does too
        await until(all_are_back)
        seconds = time.monotonic() - killed_at
        reaping.cancel()
        await until(tidied)
        assert False not in beats
    living.tell("settle")
    assert (await living.says())["refused"] == 0
    assert await store.claim(["q"], COUNT) == []
    assert len(claims) == COUNT
    assert all(c.redelivered and c.deliveries == 2 and c.attempts == 0 for c in claims)
    assert await store.settle([Ack(c.receipt) for c in claims]) == []
    report("kill -9 of a worker", url, messages=COUNT, faults=2, seconds=round(seconds, 2))
    assert seconds < 15  # about two on a quiet machine, and not the 600 of the lease
    await presence.leave()
    await living.ends()
    assert not lock_files(url)


def lock_files(url: str) -> list[Path]:
    """Of workers on SQLite."""
    return list(Path(url.removeprefix("sqlite:///")).parent.glob("*-worker-*")) if url.startswith("sqlite") else []


async def test_a_pooler_turns_the_lock_off(postgres_server: Postgres, postgres_url: str) -> None:
    """Behind a transaction pooler locks say nothing of their worker, who is then judged by leases alone."""
    database = postgres_url.rpartition("/")[2]
    direct = await millpond.connect(postgres_url, migrate=True)
    with PgBouncer(postgres_server) as pooler:
        pooled = await millpond.connect(pooler.url_of(database), pooler=True)
        told = await pooled.join("told")
        # Nobody said that this one goes through a pooler: it finds out when its session changes.
        unaware = await millpond.connect(pooler.url_of(database), pooler=True)
        unaware._options = StoreOptions()  # type: ignore[attr-defined]
        finds_out = await unaware.join("finds out")

        def by_lock() -> dict[str, int]:
            with postgres_server.connect(database) as connection:
                return dict(connection.execute("SELECT name, by_lock FROM message_worker").fetchall())

        assert by_lock() == {"told": 0, "finds out": 1}

        async def found_out() -> bool:
            # Busy neighbours make the pooler hand sessions around.
            await asyncio.gather(*(pooled.claim(["q"], 1) for _ in range(8)), finds_out.beat(), told.beat())
            return by_lock()["finds out"] == 0

        await until(found_out)
        await direct.publish([Message(queue="q", payload=b"x")])
        (claim,) = await unaware.claim(["q"], 1, 60)
        await direct.join("reaper")
        report("transaction pooler", postgres_url, messages=1, faults=1)
        assert await pooled.settle([Ack(claim.receipt)]) == []
        for store in (pooled, unaware, direct):
            await store.close()


async def test_a_lock_file_that_was_tidied_away_is_made_again(sqlite_url: str) -> None:
    store = await millpond.connect(sqlite_url)
    presence = await store.join()  # type: ignore[attr-defined]
    folder = Path(sqlite_url.removeprefix("sqlite:///")).parent
    (file,) = folder.glob("*-worker-*")
    file.unlink()
    assert await presence.beat()
    assert file.exists()
    await store.close()
    assert not file.exists()


async def test_a_cut_connection_is_noticed_and_the_lock_retaken(server_url: str, server_store: Store) -> None:
    """While no sign of life gets through, beats say so, and claims carry no mark; then all is as before."""
    parts = Url(server_url)
    with Proxy(parts.port or 0) as proxy:
        store: Store = await millpond.connect(proxy.url(server_url))  # type: ignore[assignment]
        presence = await store.join("cut off")
        assert await presence.beat()
        proxy.refuse()
        proxy.cut()
        assert not await presence.beat()
        assert not await presence.beat()
        proxy.accept()
        assert await until(presence.beat)
        assert await presence.beat()
        proxy.black_hole()  # nothing says that the connection is gone
        assert not await presence.beat()
        proxy.resume()
        assert await until(presence.beat)
        await store.close()
    async with beating(await server_store.join("left")):
        assert await server_store.reap() == 0
    report("cut connection", server_url, messages=0, faults=2)


async def test_another_thread_may_beat(url: str, store: Store) -> None:
    """A connection belongs to one loop: the lock moves to the one that beats."""
    presence = await store.join("two loops")
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
