"""A TCP proxy between a client and a server that can lose replies and connections."""

import asyncio
import contextlib
import socket
import struct
import threading
from collections.abc import Callable
from typing import Self
from urllib.parse import urlsplit, urlunsplit

from servers.ports import LOOPBACK, free_port


class Proxy:
    """Runs in its own thread; its methods may be called from any other and take effect on return.

    Patterns are searched in the bytes that pass, so they do not match encrypted data.
    """

    def __init__(self, port: int, host: str = LOOPBACK) -> None:
        self.target = (host, port)
        self.host = LOOPBACK
        self.port = free_port()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="proxy", daemon=True)
        self._links: set[_Link] = set()
        self._listener: asyncio.Server | None = None
        self._flowing = asyncio.Event()
        self._flowing.set()
        self._trap: tuple[bytes, threading.Event] | None = None

    def start(self) -> Self:
        self._thread.start()
        self.accept()
        return self

    def stop(self) -> None:
        if not self._thread.is_alive():
            return
        self.refuse()
        self.cut()
        self._call(self._finish_tasks)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.stop()

    def url(self, url: str) -> str:
        """The same URL, by way of this proxy."""
        parts = urlsplit(url)
        credentials = parts.netloc.rpartition("@")[0]
        return urlunsplit(parts._replace(netloc=f"{credentials}@{self.host}:{self.port}".lstrip("@")))

    @property
    def connections(self) -> int:
        return len(self._links)

    # Misbehaviour.

    def cut(self) -> None:
        """Reset every connection, towards both sides. New ones are still accepted."""
        self._call(self._reset_all)

    def black_hole(self) -> None:
        """Pass nothing on, close nothing: new connections open, and stay silent."""
        self._call(self._flowing.clear)

    def resume(self) -> None:
        """End a black hole. Held bytes are passed on, as TCP does when a network comes back."""
        self._call(self._flowing.set)

    def refuse(self) -> None:
        """Refuse new connections. Open ones live on."""
        self._call(self._close_listener)

    def accept(self) -> None:
        """Accept new connections again."""
        self._call(self._open_listener)

    def cut_after(self, pattern: bytes) -> threading.Event:
        """Lose one reply: the next client that sends `pattern` is reset when the server answers it.

        The pattern and all later bytes reach the server, which finishes its work; the reply is dropped.
        The returned event is set when that has happened. Other connections continue.
        """
        happened = threading.Event()
        self._call(lambda: setattr(self, "_trap", (pattern, happened)))
        return happened

    # In the proxy's own thread.

    async def _open_listener(self) -> None:
        if self._listener is None:
            self._listener = await asyncio.start_server(self._serve, self.host, self.port)

    async def _close_listener(self) -> None:
        if self._listener is not None:
            # First stop accepting, then close the newest connections: asyncio would drop these without closing them.
            for sock in self._listener.sockets:
                self._loop.remove_reader(sock)
            await asyncio.sleep(0.01)
            self._listener.close()
            self._listener = None

    async def _reset_all(self) -> None:
        for link in list(self._links):
            link.reset()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            server_reader, server_writer = await asyncio.open_connection(*self.target)
        except OSError:
            _reset(writer)
            return
        link = _Link(writer, server_writer)
        self._links.add(link)
        try:
            async with asyncio.TaskGroup() as both:
                both.create_task(self._to_server(link, reader))
                both.create_task(self._to_client(link, server_reader))
        except* OSError:
            link.reset()
        finally:
            writer.close()
            server_writer.close()
            self._links.discard(link)

    async def _to_server(self, link: "_Link", reader: asyncio.StreamReader) -> None:
        seen = b""
        while chunk := await reader.read(65536):
            await self._flowing.wait()
            if self._trap:
                pattern, happened = self._trap
                if pattern in seen + chunk:
                    link.lost_reply, self._trap = happened, None
                seen = (seen + chunk)[-len(pattern) :]  # a pattern may come in two pieces
            link.server.write(chunk)
            await link.server.drain()
        with contextlib.suppress(OSError):
            link.server.write_eof()

    async def _to_client(self, link: "_Link", reader: asyncio.StreamReader) -> None:
        while chunk := await reader.read(65536):
            if link.lost_reply:
                # The server's side is closed without a reset: a reset could make the server drop unread bytes.
                _reset(link.client)
                link.lost_reply.set()
                continue
            await self._flowing.wait()
            link.client.write(chunk)
            await link.client.drain()
        with contextlib.suppress(OSError):
            link.client.write_eof()

    async def _finish_tasks(self) -> None:
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _call(self, work: Callable[[], object]) -> None:
        async def call() -> None:
            result = work()
            if asyncio.iscoroutine(result):
                await result

        asyncio.run_coroutine_threadsafe(call(), self._loop).result(timeout=10)


class _Link:
    """One client's connection and its twin to the server."""

    def __init__(self, client: asyncio.StreamWriter, server: asyncio.StreamWriter) -> None:
        self.client = client
        self.server = server
        self.lost_reply: threading.Event | None = None

    def reset(self) -> None:
        _reset(self.client)
        _reset(self.server)


def _reset(writer: asyncio.StreamWriter) -> None:
    # Closing with a linger time of zero sends RST instead of FIN.
    if not writer.transport.is_closing():
        sock = writer.get_extra_info("socket")
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        writer.transport.abort()
