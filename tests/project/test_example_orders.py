"""The shop of examples/orders, run by the commands of its README: web, worker and database are real."""

import asyncio
import importlib
import sys
from collections.abc import Iterator
from types import ModuleType

import httpx
import pytest
from sqlalchemy import func, select


@pytest.fixture(params=["sqlite_url", "postgres_url"])
def shop(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    monkeypatch.setenv("ORDERS_URL", request.getfixturevalue(request.param))
    yield importlib.import_module("examples.orders.shop")
    for name in [name for name in sys.modules if name.startswith("examples.orders")]:
        del sys.modules[name]


async def test_orders_are_taken_shipped_and_mailed_once(shop: ModuleType) -> None:
    web = importlib.import_module("examples.orders.web")
    worker = importlib.import_module("examples.orders.worker")
    store = await _migrated(shop)
    async with web.lifespan(web.app):
        transport = httpx.ASGITransport(app=web.app)
        async with httpx.AsyncClient(transport=transport, base_url="http://shop") as client:
            assert (await client.post("/orders", json={"sku": "teapot", "quantity": 0})).status_code == 422
            for _ in range(3):
                answer = await client.post("/orders", json={"sku": "teapot", "quantity": 2})
                assert answer.status_code == 201
            await client.post("/orders", json={"sku": "unicorn", "quantity": 1})
        await shop.pond.publish("orders", {"order_id": 999})
        running = asyncio.create_task(worker.pond.run(signals=False))
        async with asyncio.timeout(90):
            while not running.done():
                stats = {s.queue: s.counts for s in await store.operations.count()}
                orders = stats["orders"]
                if (orders["COMPLETED"], orders["FAILED"], orders["RETRYABLE"]) == (3, 1, 1):
                    break
                await asyncio.sleep(0.05)
        worker.pond.stop()
        await running
        assert stats["mails"]["PENDING"] == 3
        async with shop.sessions() as session:
            assert await session.scalar(select(func.count()).select_from(shop.Shipment)) == 3
        (failed,) = await store.operations.archived("orders", states=["FAILED"])
        assert failed.reason == "there is no order 999"
    await store.close()
    await shop.engine.dispose()


async def _migrated(shop: ModuleType):
    from millpond import connect

    return await connect(shop.URL, migrate=True)
