"""The history of the archive over HTTP and on its pages."""

from __future__ import annotations

import re
from html import unescape
from pathlib import Path
from typing import Any

import httpx
import pytest

import millpond
from millpond import Ack, Message
from millpond.errors import StoreUnavailable
from millpond.outcome import Reject
from millpond.seam.transport import Capability
from millpond.server.application import application
from millpond.server.grants import Role
from millpond.server.state import ServerState
from tests import templates
from tests.server.conftest import Client, Serve
from tests.shared import KINDS, empty_database


async def settle(store: Any, completed: int, failed: int = 0, queue: str = "q") -> None:
    number = completed + failed
    await store.publish([Message(queue=queue, payload=b"1") for _ in range(number)])
    claims = await store.claim([queue], number)
    outcomes = [Ack(c.receipt) if n < completed else Reject(c.receipt, "no") for n, c in enumerate(claims)]
    assert await store.settle(outcomes) == []


def sums(reply: dict[str, Any]) -> tuple[int, int]:
    return sum(one["completed"] for one in reply["buckets"]), sum(one["failed"] for one in reply["buckets"])


@pytest.fixture(params=KINDS)
def url(request: pytest.FixtureRequest) -> str:
    return empty_database(request, request.param)


async def test_messages_of_the_last_minutes_and_hours(serve: Serve, url: str) -> None:
    client = await serve(url)
    await settle(client.store, 3, 1)
    await settle(client.store, 2, queue="other")
    for by, number in (("minute", 60), ("hour", 24)):
        reply = await client.get(f"/history?by={by}")
        assert (sums(reply), len(reply["buckets"]), reply["complete"], reply["missing"]) == ((5, 1), number, True, [])
        assert sums(await client.get(f"/history?by={by}&queue=q")) == (3, 1)
    assert not any(bucket["at_least"] for bucket in reply["buckets"])
    await client.get("/history?queue=none", expect=404)
    await client.get("/history?by=day", expect=400)


async def test_a_token_sees_the_history_of_its_queues(client: Client) -> None:
    await settle(client.store, 3)
    await settle(client.store, 2, queue="secret")
    headers = await client.token(Role.READ, queues=("q",))
    assert sums(await client.get("/history", headers=headers)) == (3, 0)
    await client.get("/history?queue=secret", headers=headers, expect=403)


async def test_pages_show_the_history_as_chart_words_and_table(client: Client) -> None:
    await settle(client.store, 1200, 3)
    for path in ("/dashboard", "/dashboard/queue?queue=q"):
        text = (await client.http.get(path)).text
        for title in ("Settled each minute, last 60 min", "Settled each hour, last 24 h"):
            (label,) = re.findall(f'role="img" aria-label="({title}:[^"]+)"', text)
            assert re.match(rf"{title}: 1,200 completed, 3 failed; most at \d\d:\d\d UTC with 1,20\d messages$", label)
        bars = re.findall(r'<rect class="(\w+)" x="([\d.]+)" y="([\d.]+)" width="([\d.]+)" height="([\d.]+)">', text)
        assert {bar[0] for bar in bars} == {"completed", "failed"}
        for _, x, y, width, height in bars:
            assert float(x) >= 56 and float(x) + float(width) <= 600 and float(height) >= 1
            assert float(y) >= 0 and float(y) + float(height) <= 156.1
        rows = re.findall(r"<time[^>]*>[\d: -]+</time></td><td>([\d,]+)</td><td>(\d+)</td>", text)
        assert sum(int(row[0].replace(",", "")) for row in rows) == 2400, "both tables"
        assert "no history" not in text


async def test_a_page_names_what_it_did_not_count(
    client: Client, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    text = (await client.http.get("/dashboard")).text
    assert "There is no queue yet" in text
    await settle(client.store, 1)
    store = await millpond.connect(templates.shards(tmp_path))
    await settle(store, 20)
    state = ServerState(store)
    inside = httpx.ASGITransport(app=application(state))
    async with httpx.AsyncClient(transport=inside, base_url="http://127.0.0.1:8420") as http:
        away = store.members.shards[1]  # type: ignore[attr-defined]

        async def cut(*args: object, **options: object) -> object:
            raise StoreUnavailable("cut")

        monkeypatch.setattr(away.store.operations, "history", cut)
        reply = (await http.get("/api/v1/history")).json()
        assert reply["missing"] == [away.name] and all(bucket["at_least"] for bucket in reply["buckets"])
        text = unescape((await http.get("/dashboard/queue?queue=q")).text)
        assert f"shards that do not answer: {away.name}" in text and "completed at least" in text
    await state.close()
    await store.close()


async def test_a_page_without_an_archive_says_so(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    await settle(client.store, 1)
    has = client.store.capabilities
    monkeypatch.setattr(type(client.store), "capabilities", has & ~Capability.ARCHIVE)
    text = (await client.http.get("/dashboard")).text
    assert "There is no history" in text and "Settled each minute" not in text
    assert "Settled per second" in text
    reply = await client.http.get("/api/v1/history")
    assert reply.status_code == 501 and "ARCHIVE" in reply.text
