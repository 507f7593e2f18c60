"""Concurrent `pond.publish` calls share transactions, and each caller gets its own result."""

import asyncio
from collections.abc import Callable
from typing import Any

import psycopg
import pymysql

from millpond import Millpond, id_from
from millpond.errors import Closed, StoreError
from tests.rooms.transactions.callers import address
from tests.triggers import failing
from tests.worker.conftest import counts, on

DATABASES = ("sqlite", "postgresql", "mariadb")


async def store(pond: Millpond) -> Any:
    return (await pond.transport)._inner  # type: ignore[attr-defined]


async def count_transactions(pond: Millpond) -> list[int]:
    """Counts the calls of the database from now on."""
    runner = (await store(pond)).runner
    run, calls = runner.run, [0]

    async def counted(*args: Any, **options: Any) -> Any:
        calls[0] += 1
        return await run(*args, **options)

    runner.run = counted
    return calls


@on(*DATABASES)
async def test_concurrent_publishes_share_transactions(pond: Millpond) -> None:
    calls = await count_transactions(pond)
    ids = await asyncio.gather(*(pond.publish("q", n) for n in range(200)))
    assert len(set(ids)) == 200 and all(id_.new for id_ in ids)
    assert calls[0] <= 4
    found = await (await pond.transport).operations.find(ids)
    assert sorted(int(row.payload) for row in found) == list(range(200))


@on(*DATABASES)
async def test_a_message_is_durable_when_its_publish_returns(
    make_pond: Callable[..., Millpond],
) -> None:
    pond, other = make_pond(), make_pond()
    reader = await other.transport

    async def publish(n: int) -> None:
        id_ = await pond.publish("q", n)
        assert len(await reader.operations.find([id_])) == 1

    await asyncio.gather(*(publish(n) for n in range(20)))


@on(*DATABASES)
async def test_a_group_that_fails_by_its_data_is_split(pond: Millpond) -> None:
    table = (await store(pond)).dialect.table("message")
    with failing(pond.url.raw, "INSERT", table, "ROW.queue = 'bad'"):
        results = await asyncio.gather(
            *(pond.publish("bad" if n % 10 == 3 else "q", n) for n in range(30)), return_exceptions=True
        )
    assert [n for n, result in enumerate(results) if isinstance(result, StoreError)] == [3, 13, 23]
    assert sum((await counts(pond)).values()) == 27
    assert not await counts(pond, "bad")


@on(*DATABASES)
async def test_one_of_several_callers_with_the_same_id_is_new(pond: Millpond) -> None:
    ids = [id_from("a"), id_from("b")]
    results = await asyncio.gather(*(pond.publish("q", n, id=ids[n % 2]) for n in range(20)))
    assert sum(result.new for result in results) == 2
    assert sum((await counts(pond)).values()) == 2


@on(*DATABASES)
async def test_close_writes_all_that_was_accepted(make_pond: Callable[..., Millpond]) -> None:
    pond, other = make_pond(), make_pond()
    await pond.transport
    calls = [asyncio.create_task(pond.publish("q", n)) for n in range(50)]
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    await pond.close()
    results = await asyncio.gather(*calls, return_exceptions=True)
    written = [result for result in results if not isinstance(result, BaseException)]
    assert all(isinstance(result, Closed) for result in results if isinstance(result, BaseException))
    assert len(written) > 1
    assert sum((await counts(other)).values()) == len(written)


@on("postgresql", "mariadb")
async def test_an_id_that_another_transaction_holds_stops_no_group(
    make_pond: Callable[..., Millpond],
) -> None:
    """The transaction that holds the id may itself wait for another publish of its program."""
    pond = make_pond(busy_timeout=60)
    held, url = id_from("held"), pond.url.raw
    await pond.transport
    connection: Any = psycopg.connect(url) if url.startswith("postgres") else pymysql.connect(**address(url))
    try:
        pond.publish_sync("q", 1, id=held, within=connection)
        blocked = [asyncio.create_task(pond.publish("q", 2, id=held)) for _ in range(2)]
        await asyncio.sleep(0)
        assert (await pond.publish("q", 3)).new
        assert not any(call.done() for call in blocked)
        connection.rollback()
        assert sorted([(await call).new for call in blocked]) == [False, True]
    finally:
        connection.close()
