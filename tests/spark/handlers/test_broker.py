"""Subscribers of a broker in Spark's tasks; its archive is read by Spark."""

from __future__ import annotations

import asyncio
import sys
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

import millpond.spark
from millpond import Millpond, State
from millpond.spark.handlers.run import supervisor_for
from tests.spark.handlers.shop import Shop
from tests.waiting import until

pytestmark = pytest.mark.slow


@pytest.fixture
async def shop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rabbitmq_url: str, postgres_url: str
) -> AsyncIterator[Shop]:
    monkeypatch.syspath_prepend(tmp_path)
    async with Millpond(postgres_url, migrate=True) as archive:
        await archive.transport
    shop = Shop(tmp_path, rabbitmq_url, archive=postgres_url)
    yield shop
    await shop.close()
    sys.modules.pop(shop.name, None)


async def test_handlers_of_a_broker_on_spark_and_its_archive_in_spark(
    shop: Shop, spark: Any, postgres_url: str
) -> None:
    pond = shop.imported().pond
    ids = await shop.pond.publish_many("orders", list(range(100)))
    await asyncio.to_thread(millpond.spark.run, pond, spark, queues=["orders"], until_idle=True)
    assert await shop.counts("orders") == {State.COMPLETED: 90, State.FAILED: 10}
    # Not the number of deliveries: the broker counts one that ends with its connection, as on a busy machine.
    runs = Counter(int(n) for n, _, _ in shop.notes("order"))
    assert runs == {n: 2 if n % 10 == 4 else 1 for n in range(100)}
    frame = spark.read.format("millpond").options(url=postgres_url, table="archive").load()
    found = {row.id: (row.queue, row.state, row.attempts) for row in frame.collect()}
    assert found == {
        str(id_): ("orders", "FAILED" if n % 10 == 3 else "COMPLETED", 2 if n % 10 == 4 else 1)
        for n, id_ in enumerate(ids)
    }


async def test_a_stop_gives_messages_back_to_the_broker(shop: Shop, spark: Any) -> None:
    await shop.pond.publish_many("held", list(range(10)))
    pond = shop.imported().pond
    supervisor = supervisor_for(pond, spark, at=None, tasks=2, queues=["held"], grace=60.0, until_idle=False)
    work = asyncio.create_task(supervisor.run())
    await until(lambda: len(shop.notes("held")) == 2 or work.done())
    supervisor.stop()
    await until(lambda: not supervisor.status.ready)
    shop.give_the_word()
    async with asyncio.timeout(60):
        assert await work == 0, supervisor.last_output
    assert supervisor.status.counts["ack"] == 2
    assert await shop.counts("held") == {State.COMPLETED: 2, State.PENDING: 8}
    (claim, *_) = await (await shop.pond.transport).claim(["held"], 8)
    assert (claim.deliveries, claim.crashes) == (1, 0), "messages that were not started count no delivery"
