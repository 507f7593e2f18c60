"""MySQL and MariaDB take statements of `max_allowed_packet` bytes at most, and end the connection of a larger one."""

import asyncio
from collections.abc import Iterator

import pymysql
import pytest
from sqlalchemy.ext.asyncio import create_async_engine

import millpond
from millpond import Message, Millpond, Nack, Reject, Retry, State
from millpond.errors import BodyTooLarge, InvalidOption
from servers import MariaDB
from tests.rooms.transactions.callers import address, sqlalchemy_url
from tests.waiting import until

pytestmark = pytest.mark.slow

LARGEST = (16 * 1024 * 1024 - 8 * 64 * 1024 - 16 * 1024) // 2
"""The largest `body_limit` of a server with default settings."""


@pytest.mark.parametrize("outcome", [Nack, Reject])
@pytest.mark.parametrize("text", ["💥", "\x01"], ids=["bytes", "escapes"])
async def test_a_batch_of_long_errors_is_settled(
    mariadb_url: str, text: str, outcome: type[Nack] | type[Reject]
) -> None:
    """Escaping makes the second text seven times as long."""
    store = await millpond.connect(mariadb_url, migrate=True, reconnect_timeout=20)
    await store.publish([Message(queue="q", payload=b"x") for _ in range(1000)])
    claims = await store.claim(["q"], limit=1000)
    outcomes = [outcome(claim.receipt, error=f"{n} " + text * 8192) for n, claim in enumerate(claims)]
    assert await store.settle(outcomes) == []
    (stats,) = await store.operations.count(["q"])
    assert stats.counts[State.RETRYABLE if outcome is Nack else State.FAILED] == 1000
    await store.close()


@pytest.fixture
def lower_limit(own_mariadb: MariaDB) -> Iterator[pymysql.Connection]:  # type: ignore[type-arg]
    """A connection to a server whose limit is set back at the end."""
    url = own_mariadb.create_database("packet")
    with pymysql.connect(**address(url), autocommit=True) as connection, connection.cursor() as cursor:
        try:
            yield connection
        finally:
            cursor.execute("SET GLOBAL max_allowed_packet = DEFAULT")
            own_mariadb.drop_database("packet")


async def test_a_batch_that_ends_its_connection_is_halved(
    own_mariadb: MariaDB,
    lower_limit: pymysql.Connection,  # type: ignore[type-arg]
) -> None:
    """The limit was lowered after connecting: the store does not know it, and the worker goes on."""
    pond = Millpond(own_mariadb.url_of("packet"), migrate=True)
    together = asyncio.Event()

    @pond.subscriber("q", max_workers=500, retry=Retry.constant(3600, attempts=2))
    async def handle(body: int) -> None:
        await together.wait()
        raise ValueError("x" * 8000)

    await pond.publish_many("q", range(500))
    with lower_limit.cursor() as cursor:
        cursor.execute("SET GLOBAL max_allowed_packet = 1048576")
        cursor.execute("SELECT id FROM information_schema.processlist WHERE db = database() AND id <> connection_id()")
        for (session,) in cursor.fetchall():
            cursor.execute(f"KILL {session}")
    run = asyncio.create_task(pond.run(signals=False))
    await until(lambda: run.done() or (pond.worker is not None and pond.worker.running == 500), "500 handlers")
    assert not run.done(), await run
    together.set()

    async def all_settled() -> bool:
        (stats,) = await (await pond.transport).operations.count(["q"])
        return stats.counts[State.RETRYABLE] == 500

    await until(all_settled)
    assert pond.worker is not None and pond.worker.lost == 0
    pond.stop()
    await run
    await pond.close()


async def test_the_largest_body_of_a_server(mariadb_url: str) -> None:
    """Every body up to `body_limit` can be published, and a larger one is refused for good."""
    store = await millpond.connect(mariadb_url, migrate=True, body_limit=LARGEST)
    body = b"\0" * LARGEST  # each byte is written as two
    await store.publish([Message(queue="q", payload=body, headers={"h": "💥" * 16_000})])
    (claim,) = await store.claim(["q"])
    assert claim.message.payload == body
    for size in (LARGEST + 1, 20 << 20, 33 << 20, 50 << 20):
        with pytest.raises(BodyTooLarge):
            await store.publish([Message(queue="q", payload=bytes(size))])
    await store.close()


async def test_a_body_limit_above_the_servers_is_refused(mariadb_url: str) -> None:
    with pytest.raises(InvalidOption, match=r"max_allowed_packet.*16,777,216"):
        await millpond.connect(mariadb_url, migrate=True, body_limit=LARGEST + 1)
    engine = create_async_engine(sqlalchemy_url(mariadb_url, "asyncmy"))
    with pytest.raises(InvalidOption, match="max_allowed_packet"):
        await millpond.connect("mysql://", pool=engine, body_limit=64 << 20)
    await engine.dispose()
