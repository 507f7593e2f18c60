"""A row that another transaction has locked delays its own outcome only."""

import asyncio
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from uuid import UUID

import psycopg
import pymysql
import pytest

import millpond
from millpond import Ack, Delivery, LeaseLost, Message, Millpond, State, StoreBusy
from millpond.telemetry import Counters
from tests.rooms.transactions.callers import address
from tests.waiting import until
from tests.worker.conftest import became, counts, on, row, working

databases = on("postgresql", "mariadb")


@contextmanager
def locked(url: str, id_: UUID) -> Iterator[None]:
    """The row of this message is locked by another transaction while the context lasts."""
    connection: Any
    if url.startswith("postgres"):
        connection, value = psycopg.connect(url), str(id_)
    else:
        connection, value = pymysql.connect(**address(url)), id_.bytes
    with connection, connection.cursor() as cursor:
        cursor.execute("SELECT id FROM millpond_message WHERE id = %s FOR UPDATE", (value,))
        assert len(cursor.fetchall()) == 1
        yield
        connection.rollback()


@databases
async def test_a_locked_row_delays_only_itself(pond: Millpond, url: str) -> None:
    """Outcomes of other rows are written and confirmed at once, and none of them is taken for lost."""
    counters = Counters()
    pond.telemetry.subscribe(counters)
    results: Counter[str] = Counter()
    started, finish = asyncio.Event(), asyncio.Event()

    @pond.subscriber("slow")
    async def slow(body: int) -> None:
        started.set()
        await finish.wait()

    @pond.subscriber("q", keep_acked=False, max_workers=20)
    async def handle(body: int, delivery: Delivery) -> None:
        try:
            await delivery.ack()
            results["acked"] += 1
        except LeaseLost:
            results["lost"] += 1

    async with working(pond):
        id_ = await pond.publish("slow", 1)
        await started.wait()
        with locked(url, id_):
            finish.set()
            await pond.publish_many("q", range(100))
            await until(lambda: results.total() == 100)
            assert (await row(pond, id_)).state is State.PROCESSING
        await became(pond, id_, State.COMPLETED)
        assert pond.worker is not None and pond.worker.lost == 0
    assert results == {"acked": 100}
    assert counters.as_dict() == {"published": 101, "claimed": 101, "redelivered": 0, "ack": 101}


@databases
async def test_many_locked_rows_do_not_stop_the_worker(pond: Millpond, url: str) -> None:
    """Each is settled once its lock is gone, independent of the others."""

    @pond.subscriber("q", max_workers=20)
    async def handle(body: int) -> None:
        await asyncio.sleep(0)

    ids = await pond.publish_many("q", range(60), delay=3600)
    store = await pond.transport
    with locked(url, ids[10]), locked(url, ids[20]):
        await store.operations.reschedule([id_ for n, id_ in enumerate(ids) if n not in (10, 20)], delay=0)
        async with working(pond):
            await until(lambda: completed(pond, 58))
    assert await counts(pond) == {State.COMPLETED: 58, State.PENDING: 2}


async def completed(pond: Millpond, number: int) -> bool:
    return (await counts(pond)).get(State.COMPLETED) == number


@databases
async def test_a_handler_that_hangs_in_its_transaction_stops_no_other_ack(pond: Millpond, url: str) -> None:
    started, leave = asyncio.Event(), asyncio.Event()
    acked = 0

    @pond.subscriber("hangs")
    async def hangs(body: int, delivery: Delivery) -> None:
        with locked(url, delivery.id):
            started.set()
            await asyncio.wait_for(leave.wait(), 120)

    @pond.subscriber("q")
    async def handle(body: int, delivery: Delivery) -> None:
        nonlocal acked
        await delivery.ack()
        acked += 1

    async with working(pond):
        await pond.publish("hangs", 1)
        await started.wait()
        await pond.publish_many("q", range(50))
        await until(lambda: acked == 50)
        leave.set()


@databases
@pytest.mark.parametrize("keep", [True, False])
async def test_the_error_names_locked_and_stale_receipts(url: str, keep: bool) -> None:
    """A caller without a worker: all other outcomes were written."""
    store = await millpond.connect(url, busy_timeout=0.2)
    await store.publish([Message(queue="q", payload=b"%d" % n) for n in range(3)])
    free, held, stale = [claim.receipt for claim in await store.claim(["q"], limit=3)]
    stale = millpond.Receipt(stale.id, stale.token + 1)
    outcomes = [Ack(receipt, keep=keep) for receipt in (free, held, stale)]
    for wait in (True, False):
        with locked(url, held.id), pytest.raises(StoreBusy) as caught:
            await store.settle(outcomes, wait=wait, again=not wait)
        assert caught.value.receipts == (held,)
        assert caught.value.refused == (stale,)
    assert await store.settle(outcomes, again=True) == [stale]
    await store.close()
