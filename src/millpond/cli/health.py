"""`/live` and `/ready` over HTTP, for process managers. A blocked event loop does not answer."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

LOOPBACK = "127.0.0.1"
_READ_WITHIN = 5.0
_LONGEST = 8192


@asynccontextmanager
async def serve(
    host: str, port: int, obstacle: Callable[[], str | None], facts: Callable[[], dict[str, Any]]
) -> AsyncIterator[int]:
    """Answer requests while the context is open; yields the port. Port 0 takes a free one.

    `obstacle`: the reason why `/ready` is 503; None: it is 200.
    """

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        broken = (OSError, ValueError, TimeoutError, asyncio.IncompleteReadError, asyncio.LimitOverrunError)
        with contextlib.suppress(*broken):
            async with asyncio.timeout(_READ_WITHIN):
                head = await reader.readuntil(b"\r\n\r\n")
                method, path, *_ = head.split(b" ", 2)
                writer.write(_response(method, path.split(b"?")[0], obstacle(), facts()))
                await writer.drain()
        with contextlib.suppress(OSError):
            writer.close()

    server = await asyncio.start_server(answer, host, port, limit=_LONGEST)
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()


def _response(method: bytes, path: bytes, obstacle: str | None, facts: dict[str, Any]) -> bytes:
    if method not in (b"GET", b"HEAD"):
        return _http("405 Method Not Allowed", {"error": "GET /live or /ready"}, True)
    if path == b"/live":
        return _http("200 OK", {"live": True, **facts}, method == b"GET")
    if path == b"/ready":
        if obstacle is None:
            return _http("200 OK", {"ready": True, **facts}, method == b"GET")
        return _http("503 Service Unavailable", {"ready": False, "obstacle": obstacle, **facts}, method == b"GET")
    return _http("404 Not Found", {"error": "only /live and /ready exist"}, method == b"GET")


def _http(status: str, body: dict[str, Any], with_body: bool) -> bytes:
    text = json.dumps(body).encode() + b"\n"
    head = f"HTTP/1.1 {status}\r\nContent-Type: application/json\r\nContent-Length: {len(text)}\r\n"
    return head.encode() + b"Cache-Control: no-store\r\nConnection: close\r\n\r\n" + (text if with_body else b"")
