"""The server inside another ASGI application: HTTP and dashboard, with that application's login or with tokens."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from typing import Any
from weakref import WeakKeyDictionary

from starlette.applications import Starlette

from millpond.seam.transport import Transport
from millpond.server.application import application
from millpond.server.problems import ErrorReply, problem
from millpond.server.settings import Resolver, ServerSettings, parse_masks
from millpond.server.state import ServerState

log = logging.getLogger("millpond.server")

Receive = Callable[[], Awaitable[Any]]
Send = Callable[[Any], Awaitable[None]]


class MountedServer:
    """An ASGI application that connects at its first request. Each event loop has its own connections."""

    def __init__(self, connect: Callable[[], Awaitable[Transport]], settings: ServerSettings) -> None:
        self._connect = connect
        self._settings = settings
        self._applications: WeakKeyDictionary[Transport, Starlette] = WeakKeyDictionary()

    async def __call__(self, scope: Any, receive: Receive, send: Send) -> None:
        match scope["type"]:
            case "lifespan":
                await self._lifespan(receive, send)
            case "http":
                try:
                    app = await self._application()
                except Exception as e:  # its text may name the database
                    log.error("the mounted server cannot connect: %s", e)
                    refusal = ErrorReply(503, type(e).__name__, "the database cannot be used; the log has the reason")
                    await problem(refusal)(scope, receive, send)
                    return
                await app(scope, receive, send)
            case "websocket":
                await send({"type": "websocket.close", "code": 1000})

    async def _application(self) -> Starlette:
        transport = await self._connect()
        found = self._applications.get(transport)
        if found is None:
            found = self._applications[transport] = application(ServerState(transport, self._settings))
        return found

    async def _lifespan(self, receive: Receive, send: Send) -> None:
        """Sent only if this is the outermost application; a mount has no lifespan."""
        while (message := await receive())["type"] != "lifespan.shutdown":
            if message["type"] == "lifespan.startup":
                await send({"type": "lifespan.startup.complete"})
        for app in list(self._applications.values()):
            await app.state.server.close()
        await send({"type": "lifespan.shutdown.complete"})


def mounted(
    connect: Callable[[], Awaitable[Transport]],
    *,
    resolver: Resolver | None = None,
    mask: list[str] | None = None,
    open_to_all: bool = False,
) -> MountedServer:
    """The application of a pond. Without tokens, resolver or `open_to_all` every caller is refused."""
    settings = ServerSettings(mounted=True, resolver=resolver, mask=parse_masks(mask or []), open_to_all=open_to_all)
    return MountedServer(connect, settings)
