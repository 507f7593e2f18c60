"""The server is killed during calls: they succeed after its return, or may be repeated."""

import asyncio
import time
from typing import Any
from uuid import UUID, uuid4

import pytest

import millpond
from millpond import Ack, Message, StoreUnavailable, Transport
from servers import MariaDB, Postgres
from tests.waiting import until

pytestmark = [pytest.mark.timeout(900), pytest.mark.slow]  # recovery of a killed server is slow on a busy machine


@pytest.fixture(params=["own_postgres", "own_mariadb"])
def server(request: pytest.FixtureRequest) -> Postgres | MariaDB:
    fixture: Postgres | MariaDB = request.getfixturevalue(request.param)
    return fixture


async def test_nothing_is_lost_or_doubled_by_a_kill(server: Postgres | MariaDB) -> None:
    url = server.create_database(f"crash_{uuid4().hex[:8]}")
    store = await millpond.connect(url, migrate=True, pool_size=6, reconnect_timeout=120)
    published: list[UUID] = []
    acked: list[UUID] = []
    restarted = asyncio.Event()

    async def publish(given: bool, count: int) -> None:
        while not restarted.is_set():
            messages = [Message(queue="q", payload=b"x", id=uuid4() if given else None) for _ in range(count)]
            published.extend(p.id for p in await store.publish(messages))

    async def drain() -> None:
        while True:
            claims = await store.claim(["q"], limit=50)
            assert await store.settle([Ack(claim.receipt) for claim in claims]) == []
            acked.extend(claim.receipt.id for claim in claims)
            if not claims and restarted.is_set() and all(task.done() for task in publishers):
                return

    publishers = [asyncio.create_task(publish(given, count)) for given in (True, False) for count in (1, 40)]
    drainers = [asyncio.create_task(drain()) for _ in range(2)]
    await until(lambda: len(published) > 200 and len(acked) > 100)
    for _ in range(2):
        await asyncio.to_thread(server.kill)
        await asyncio.to_thread(server.start)
        after = len(acked) + 100
        await until(lambda after=after: len(acked) > after)
    restarted.set()
    await asyncio.gather(*publishers, *drainers)
    assert len(acked) == len(set(acked))
    assert set(acked) == set(published)
    await store.close()


async def test_a_server_that_stays_away(server: Postgres | MariaDB) -> None:
    url = server.create_database(f"crash_{uuid4().hex[:8]}")
    store = await millpond.connect(url, migrate=True, reconnect_timeout=1)
    await store.publish([Message(queue="q", payload=b"x")])
    (claim,) = await store.claim(["q"])
    await asyncio.to_thread(server.kill)
    started = time.monotonic()
    calls: list[Any] = [
        store.publish([Message(queue="q", payload=b"x")]),
        store.claim(["q"]),
        store.settle([Ack(claim.receipt)]),
    ]
    results = await asyncio.gather(*calls, return_exceptions=True)
    assert [type(result) for result in results] == [StoreUnavailable] * 3
    assert time.monotonic() - started < 60
    await asyncio.to_thread(server.start)
    assert await store.settle([Ack(claim.receipt)]) == []
    await store.close()


async def test_a_shutdown_in_good_order(server: Postgres | MariaDB) -> None:
    url = server.create_database(f"crash_{uuid4().hex[:8]}")
    store = await millpond.connect(url, migrate=True, reconnect_timeout=120)
    await works(store)
    restart = asyncio.create_task(asyncio.to_thread(server.restart))
    while not restart.done():
        await works(store)
    await restart
    await works(store)
    await store.close()


async def works(store: Transport) -> None:
    (published,) = await store.publish([Message(queue="w", payload=b"x", priority=0)])
    claims = await store.claim(["w"], limit=10)
    assert published.id in [claim.receipt.id for claim in claims]
    assert await store.settle([Ack(claim.receipt) for claim in claims]) == []
