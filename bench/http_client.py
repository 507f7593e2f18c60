"""A small HTTP client with little cost: measurements of the server use it."""

import asyncio
from types import TracebackType
from typing import Any
from urllib.parse import urlsplit

import msgspec


class HttpClient:
    """One connection that is kept, and one request at a time."""

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        self._host, self._port = parts.hostname or "127.0.0.1", parts.port or 80
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def get(self, path: str) -> tuple[int, bytes]:
        return await self._send("GET", path, b"")

    async def post(self, path: str, body: Any) -> Any:
        """The reply of a route of the HTTP interface. Raises if it is not 200."""
        status, content = await self._send("POST", f"/api/v1{path}", msgspec.json.encode(body))
        if status != 200:
            raise RuntimeError(f"POST {path}: {status} {content[:200]!r}")
        return msgspec.json.decode(content)

    async def _send(self, method: str, path: str, content: bytes) -> tuple[int, bytes]:
        if self._streams is None:
            self._streams = await asyncio.open_connection(self._host, self._port)
        reader, writer = self._streams
        head = f"{method} {path} HTTP/1.1\r\nhost: {self._host}:{self._port}\r\ncontent-type: application/json\r\n"
        writer.write(f"{head}content-length: {len(content)}\r\n\r\n".encode() + content)
        first, *lines = (await reader.readuntil(b"\r\n\r\n")).split(b"\r\n")
        fields = dict(line.lower().split(b": ", 1) for line in lines if line)
        return int(first.split()[1]), await reader.readexactly(int(fields[b"content-length"]))

    async def __aenter__(self) -> "HttpClient":
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._streams is not None:
            self._streams[1].close()
            self._streams = None
