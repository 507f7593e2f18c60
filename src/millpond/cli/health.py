"""`/live` and `/ready`, for whoever looks after processes. On loopback only; a blocked event loop answers nothing."""

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
async def served(port: int, ready: Callable[[], bool], facts: Callable[[], dict[str, Any]]) -> AsyncIterator[int]:
    """Answer as long as this lasts; gives the port, which is a free one for 0."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError, ValueError, TimeoutError, asyncio.IncompleteReadError):
            async with asyncio.timeout(_READ_WITHIN):
                head = await reader.readuntil(b"\r\n\r\n")
                method, path, *_ = head.split(b" ", 2)
                writer.write(_response(method, path.split(b"?")[0], ready(), facts()))
                await writer.drain()
        with contextlib.suppress(OSError, asyncio.LimitOverrunError):
            writer.close()

    server = await asyncio.start_server(answer, LOOPBACK, port, limit=_LONGEST)
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()


def _response(method: bytes, path: bytes, ready: bool, facts: dict[str, Any]) -> bytes:
    if method not in (b"GET", b"HEAD"):
        return _http("405 Method Not Allowed", {"error": "GET /live or /ready"}, True)
    if path == b"/live":
        return _http("200 OK", {"live": True, **facts}, method == b"GET")
    if path == b"/ready":
        return _http("200 OK" if ready else "503 Service Unavailable", {"ready": ready, **facts}, method == b"GET")
    return _http("404 Not Found", {"error": "there are /live and /ready"}, method == b"GET")


def _http(status: str, body: dict[str, Any], with_body: bool) -> bytes:
    text = json.dumps(body).encode() + b"\n"
    head = f"HTTP/1.1 {status}\r\nContent-Type: application/json\r\nContent-Length: {len(text)}\r\n"
    return head.encode() + b"Cache-Control: no-store\r\nConnection: close\r\n\r\n" + (text if with_body else b"")
