"""The shards of a pond over HTTP and on their page, also if one does not answer."""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest

import millpond
from millpond import Message
from millpond.errors import StoreUnavailable
from millpond.server.application import application
from millpond.server.state import ServerState
from tests import templates


async def test_shards_are_shown_with_their_answers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    transport = await millpond.connect(templates.shards(tmp_path))
    await transport.publish([Message(queue="q", payload=b"1") for _ in range(20)])
    app = application(ServerState(transport))
    inside = httpx.ASGITransport(app=app)
    async with httpx.AsyncClient(transport=inside, base_url="http://127.0.0.1:8420") as http:
        shards = (await http.get("/api/v1/shards")).json()["shards"]
        assert len(shards) == 3 and sum(shard["live"] for shard in shards) == 20
        assert all(shard["answers"] and shard["key_ranges"] for shard in shards)
        assert 'href="/dashboard/shards"' in (await http.get("/dashboard")).text

        async def fail(*args: object, **options: object) -> object:
            raise StoreUnavailable("cut")

        away = transport.members.shards[1]  # type: ignore[attr-defined]
        monkeypatch.setattr(away.store.operations, "count", fail)
        shards = (await http.get("/api/v1/shards")).json()["shards"]
        assert [shard["answers"] for shard in shards] == [True, False, True]
        page = await http.get("/dashboard/shards")
        assert page.status_code == 200 and "no answer" in page.text
    await transport.close()
