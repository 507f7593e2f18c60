"""The server inside FastAPI and Starlette, behind a prefix, with the application's login or with tokens."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from starlette.applications import Starlette

from millpond import Millpond
from millpond.server.dashboard import live_counts
from millpond.server.grants import Grant, Role
from millpond.server.tokens import new_token

Make = Callable[[Any], Any]


def starlette(inner: Any) -> Any:
    app = Starlette()
    app.mount("/queue", inner)
    return app


def fastapi(inner: Any) -> Any:
    app = FastAPI()
    app.mount("/queue", inner)
    return app


def client(app: Any) -> httpx.AsyncClient:
    return httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://127.0.0.1:8000")


@pytest.fixture(params=[starlette, fastapi])
def make(request: pytest.FixtureRequest) -> Make:
    return request.param  # type: ignore[no-any-return]


async def test_without_tokens_or_resolver_every_caller_is_refused(make: Make) -> None:
    async with Millpond("memory://") as pond, client(make(pond.asgi())) as http:
        for host in ("127.0.0.1", "localhost", "shop.example"):
            for path in ("/queue/api/v1/queues", "/queue/dashboard"):
                assert (await http.get(path, headers={"host": host})).status_code == 401
        assert (await http.get("/queue/live")).status_code == 200


async def test_tokens_open_a_mounted_server(make: Make) -> None:
    async with Millpond("memory://") as pond, client(make(pond.asgi(mask=["read:secret"]))) as http:
        text, stored = new_token("t", [Role.READ], ["*"])
        await (await pond.transport).access.add_token(stored)
        await pond.publish("secret", {"card": 1})
        headers = {"authorization": f"Bearer {text}"}
        (message,) = (await http.get("/queue/api/v1/messages", headers=headers)).json()["messages"]
        assert message["masked"]


async def test_the_application_resolves_its_users(make: Make) -> None:
    async def resolver(request: Any) -> Grant | None:
        user = request.headers.get("x-user")
        return Grant(user, frozenset({Role.READ, Role.PUBLISH})) if user else None

    async with Millpond("memory://") as pond, client(make(pond.asgi(resolver=resolver))) as http:
        assert (await http.get("/queue/api/v1/queues")).status_code == 401
        user = {"x-user": "anna"}
        reply = await http.post("/queue/api/v1/queues/q/messages", json={"body": 1}, headers=user)
        assert reply.status_code == 200
        page = await http.get("/queue/dashboard", headers=user)
        links = re.findall(r'(?:href|src|action|data-events)="([^"#]+)"', page.text)
        assert links and all(link.startswith("/queue/dashboard") for link in links)
        assert (await http.post("/queue/api/v1/queues/q/pause", json={}, headers=user)).status_code == 403


async def test_a_program_may_open_it_to_all(make: Make) -> None:
    async with Millpond("memory://") as pond, client(make(pond.asgi(open_to_all=True))) as http:
        assert (await http.get("/queue/dashboard", headers={"host": "shop.example"})).status_code == 200


async def test_a_database_that_is_away_is_no_error_of_the_application(tmp_path: Path) -> None:
    pond = Millpond(f"sqlite:///{tmp_path / 'none' / 'pond.db'}")
    async with client(starlette(pond.asgi())) as http:
        reply = await http.get("/queue/api/v1/queues")
        assert reply.status_code == 503 and str(tmp_path) not in reply.text
    await pond.close()


async def test_events_of_a_mounted_server_end_by_themselves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live_counts, "_LONGEST", 0.0)
    async with Millpond("memory://") as pond, client(starlette(pond.asgi(open_to_all=True))) as http:
        async with asyncio.timeout(60):
            text = (await http.get("/queue/dashboard/events")).text
        assert "event: again" in text


async def test_it_is_an_application_of_its_own() -> None:
    sent: list[Any] = []
    messages = iter([{"type": "lifespan.startup"}, {"type": "lifespan.shutdown"}])

    async def receive() -> Any:
        return next(messages)

    async def send(message: Any) -> None:
        sent.append(message["type"])

    async with Millpond("memory://") as pond:
        app = pond.asgi(open_to_all=True)
        async with client(app) as http:
            assert (await http.get("/api/v1/queues")).json() == {"queues": []}
        await app({"type": "lifespan"}, receive, send)
    assert sent == ["lifespan.startup.complete", "lifespan.shutdown.complete"]
