"""A server on a real store, called as a client calls it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import httpx
import pytest

import millpond
from millpond import Transport
from millpond.server.application import application
from millpond.server.grants import Role
from millpond.server.settings import ServerSettings
from millpond.server.state import ServerState
from millpond.server.tokens import new_token

API = "/api/v1"


class Client:
    """Calls the application in this process. `roles` gives it a token with these roles."""

    def __init__(self, store: Transport, settings: ServerSettings) -> None:
        self.store = store
        self.state = ServerState(store, settings)
        self.app = application(self.state)
        transport = httpx.ASGITransport(app=self.app, raise_app_exceptions=False)
        self.http = httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1:8420", timeout=60)

    async def token(self, *roles: Role, queues: tuple[str, ...] = ("*",), name: str = "test") -> dict[str, str]:
        """Headers of a caller with a new token."""
        text, stored = new_token(name, list(roles), queues)
        await self.store.access.add_token(stored)
        self.state.tokens.forget()
        return {"authorization": f"Bearer {text}"}

    async def call(
        self, method: str, path: str, body: Any = None, *, expect: int = 200, headers: Any = None, **options: Any
    ) -> Any:
        given = {"content-type": "application/json", **(headers or {})} if method != "GET" else headers
        reply = await self.http.request(method, path, json=body, headers=given, **options)
        assert reply.status_code == expect, (reply.status_code, reply.text)
        return reply.json()

    async def post(self, path: str, body: Any = None, **options: Any) -> Any:
        return await self.call("POST", f"{API}{path}", body, **options)

    async def get(self, path: str, **options: Any) -> Any:
        return await self.call("GET", f"{API}{path}", **options)


Serve = Callable[..., Awaitable[Client]]


@pytest.fixture
async def serve() -> AsyncIterator[Serve]:
    """Make servers on stores in memory; they end after the test."""
    clients: list[Client] = []

    async def serve(url: str = "memory://", **settings: Any) -> Client:
        options = {} if url.startswith("memory") else {"migrate": True}
        client = Client(await millpond.connect(url, **options), ServerSettings(**settings))
        clients.append(client)
        return client

    yield serve
    for client in clients:
        await client.http.aclose()
        await client.state.close()
        await client.store.close()


@pytest.fixture
async def client(serve: Serve) -> Client:
    return await serve()
