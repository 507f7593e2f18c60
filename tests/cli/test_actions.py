"""Changes by commands are recorded among the actions of operators; lists are not."""

from __future__ import annotations

import asyncio
import json

import millpond
from millpond import Message
from millpond.seam.access import Action
from tests.cli.conftest import Cli


def test_changes_are_recorded(cli: Cli, sqlite_url: str) -> None:
    async def prepare() -> str:
        store = await millpond.connect(sqlite_url, migrate=True)
        (one,) = await store.publish([Message(queue="orders", payload=b"1")])
        await store.close()
        return str(one.id)

    async def recorded() -> list[Action]:
        store = await millpond.connect(sqlite_url)
        found = await store.access.actions()
        await store.close()
        return found

    id_ = asyncio.run(prepare())
    for command in (["list", "orders"], ["periodic"], ["tokens"], ["retry", "--queue", "orders", "--preview"]):
        cli.ok(*command, "--url", sqlite_url)
    assert asyncio.run(recorded()) == []
    cli.ok("pause", "orders", "--url", sqlite_url)
    cli.ok("cancel", id_, "--reason", "test", "--url", sqlite_url)
    cancelled, paused = asyncio.run(recorded())
    assert (paused.action, paused.queue) == ("pause", "orders") and paused.actor.endswith("(command line)")
    assert cancelled.action == "cancel" and json.loads(cancelled.detail) == {"ids": [id_], "reason": "test"}
