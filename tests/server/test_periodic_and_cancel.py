"""Schedules, and the cancel of running messages, over HTTP."""

from __future__ import annotations

import asyncio
from uuid import UUID

from millpond import Millpond, State
from tests.server.conftest import Serve
from tests.worker.conftest import became, working


async def test_schedules_are_listed_and_changed(serve: Serve, sqlite_url: str) -> None:
    pond = Millpond(sqlite_url)
    pond.every("0 3 * * *", queue="cleanup", name="a/b <nightly>")(lambda: None)
    await pond.run(until_idle=True, signals=False)
    client = await serve(sqlite_url)
    (entry,) = (await client.get("/periodic"))["periodic"]
    assert (entry["name"], entry["schedule"], entry["timezone"]) == ("a/b <nightly>", "0 3 * * *", "UTC")
    named = {"name": entry["name"]}
    assert await client.post("/periodic", {**named, "schedule": "every 60", "paused": True}) == {"done": True}
    assert await client.post("/periodic", {**named, "queue": "other"}) == {"done": True}
    (entry,) = (await client.get("/periodic"))["periodic"]
    assert entry["schedule"] == "every 60" and entry["paused"] and entry["queue"] == "other"
    await client.post("/periodic", {**named, "schedule": "61 * * * *"}, expect=400)
    await client.post("/periodic", {**named, "missed": "maybe"}, expect=400)
    await client.post("/periodic", {"name": "nothing", "paused": True}, expect=404)
    await pond.close()


async def test_a_running_message_is_cancelled(serve: Serve, sqlite_url: str) -> None:
    pond, running = Millpond(sqlite_url), asyncio.Event()

    @pond.subscriber("q")
    async def handle(body: int) -> None:
        running.set()
        await asyncio.Event().wait()

    id_ = str(await pond.publish("q", 1))
    client = await serve(sqlite_url)
    async with working(pond):
        await running.wait()
        assert await client.post("/messages/cancel", {"ids": [id_]}) == {"ids": []}
        answer = await client.post("/messages/cancel", {"ids": [id_], "running": True, "reason": "by hand"})
        assert answer["requested"] == [id_]
        assert (await became(pond, UUID(id_), State.FAILED)).reason == "by hand"
    await pond.close()
