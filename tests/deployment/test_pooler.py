"""Behind PgBouncer in transaction mode, where two transactions of one client may be in two sessions."""

import asyncio
from collections.abc import Iterator

import asyncpg
import pytest

import millpond
from millpond import Ack, Message
from servers import PgBouncer, Postgres
from tests.deployment.work import everything_at_once


@pytest.fixture(scope="module")
def bouncer(postgres_server: Postgres) -> Iterator[PgBouncer]:
    # Fewer sessions than clients, so that they are handed from one to the next all the time.
    with PgBouncer(postgres_server, pool_size=3) as bouncer:
        yield bouncer


async def test_twenty_tasks_over_five_connections(bouncer: PgBouncer, postgres_url: str) -> None:
    url = bouncer.url_of(postgres_url.rpartition("/")[2])
    store = await millpond.connect(url, pooler=True, pool_size=5, migrate=True)
    await everything_at_once(store, 20)
    await store.close()


async def test_several_stores_share_the_sessions(bouncer: PgBouncer, postgres_url: str) -> None:
    """Each has its own idea of which statements are prepared, and none may matter."""
    url = bouncer.url_of(postgres_url.rpartition("/")[2])
    first = await millpond.connect(url, pooler=True, migrate=True)
    others = [await millpond.connect(url, pooler=True) for _ in range(3)]
    messages = [Message(queue="q", payload=bytes([n])) for n in range(200)]
    await asyncio.gather(*(store.publish(messages[n::4]) for n, store in enumerate((first, *others))))

    async def drain(store: millpond.Transport) -> list[int]:
        done: list[int] = []
        while claims := await store.claim(["q"], limit=7):
            assert await store.settle([Ack(claim.receipt) for claim in claims]) == []
            done += [claim.message.payload[0] for claim in claims]
        return done

    drained = await asyncio.gather(*(drain(store) for store in (first, *others)))
    assert sorted(n for done in drained for n in done) == list(range(200))
    for store in (first, *others):
        await store.close()


async def test_settings_do_not_stay_on_shared_sessions(bouncer: PgBouncer, postgres_url: str) -> None:
    url = bouncer.url_of(postgres_url.rpartition("/")[2])
    store = await millpond.connect(url, pooler=True, migrate=True)
    await everything_at_once(store, 5)
    await store.close()
    text = "SELECT setting FROM pg_settings WHERE name IN ('lock_timeout', 'enable_seqscan', 'plan_cache_mode')"
    for _ in range(5):
        connection = await asyncpg.connect(url, statement_cache_size=0)
        assert {row[0] for row in await connection.fetch(text)} == {"0", "on", "auto"}
        await connection.close()


async def test_the_pooler_restarts(postgres_server: Postgres, postgres_url: str) -> None:
    with PgBouncer(postgres_server) as own:
        store = await millpond.connect(own.url_of(postgres_url.rpartition("/")[2]), pooler=True, migrate=True)
        await everything_at_once(store, 3)
        own.kill()
        call = asyncio.create_task(store.publish([Message(queue="q", payload=b"x")]))
        await asyncio.to_thread(own.start)
        assert (await call)[0].new
        await store.close()
