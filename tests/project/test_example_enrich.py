"""The job of examples/enrich prices each order once, also when it is started again."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

import millpond
from examples.enrich.job import start
from millpond import Message
from tests.spark.write.test_sink import live, migrated

pytestmark = pytest.mark.slow


def publish(url: str, *bodies: bytes) -> None:
    async def run() -> None:
        store = await millpond.connect(url)
        await store.publish([Message(queue="orders", payload=body, key="k", headers={"trace": "x"}) for body in bodies])
        await store.close()

    asyncio.run(run())


def test_orders_are_priced_once(spark: Any, sqlite_url: str, tmp_path: Path) -> None:
    url = migrated(sqlite_url)
    publish(url, b'{"sku": "teapot", "quantity": 2}', b'{"sku": "cup", "quantity": 3}', b"no order at all")
    for _ in range(2):
        query = start(spark, url, str(tmp_path / "checkpoint"), once=True)
        query.awaitTermination()
        assert query.exception() is None
        publish(url, b'{"sku": "cup", "quantity": 1}')
    found = live(url, "priced")
    assert sorted(json.loads(row.payload)["total"] for row in found) == [4.0, 12.0, 25.0]
    assert {(row.key, row.headers["trace"]) for row in found} == {("k", "x")}
    assert [row.payload for row in live(url, "unreadable")] == [b"no order at all"]
    assert len(live(url, "orders")) == 1, "the last one came after the end"
