"""Connections that send nothing, or too slowly, keep no caller out."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import httpx
import pytest

from millpond.server import sockets
from millpond.server.run_server import RunningServer
from millpond.server.settings import Limits
from tests.server.live import live_server


@contextmanager
def connected(server: RunningServer) -> Iterator[socket.socket]:
    host, port = server.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=60) as connection:
        yield connection


def is_closed(connection: socket.socket) -> bool:
    """Wait for the server's end of the connection."""
    with contextlib.suppress(ConnectionResetError):
        return connection.recv(1) == b""
    return True


def test_silent_connections_lock_no_caller_out(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'pond.db'}"
    with live_server(url, limits=Limits(connections=1)) as server, ExitStack() as silent:
        with httpx.Client(base_url=server.url, timeout=60) as kept:
            assert kept.get("/live").status_code == 200
            first = silent.enter_context(connected(server))
            for _ in range(150):
                silent.enter_context(connected(server))
            assert is_closed(first)
            assert kept.get("/live").status_code == 200, "a connection with requests stays before silent ones"
        for path in ("/live", "/ready", "/api/v1/queues"):
            assert httpx.get(f"{server.url}{path}", timeout=60).status_code == 200


def test_a_reply_does_not_wait_for_acknowledgements(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[int] = []
    made = sockets.BoundedConnection.connection_made

    def watched(self: sockets.BoundedConnection, transport: asyncio.Transport) -> None:
        made(self, transport)
        found.append(transport.get_extra_info("socket").getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))

    monkeypatch.setattr(sockets.BoundedConnection, "connection_made", watched)
    with live_server(f"sqlite:///{tmp_path / 'pond.db'}") as server:
        assert httpx.get(f"{server.url}/live", timeout=60).status_code == 200
    assert found and all(found)


@pytest.mark.parametrize("sent", [b"", b"GET /live HTTP/1.1\r\nHost: x\r\n"])
@pytest.mark.parametrize("before", [False, True])
def test_a_head_that_does_not_come_ends_the_connection(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sent: bytes, before: bool
) -> None:
    if before and not sent:
        return  # an idle connection, which the time of keep-alive bounds
    monkeypatch.setattr(sockets, "_HEAD_WITHIN", 0.3)
    with live_server(f"sqlite:///{tmp_path / 'pond.db'}") as server, connected(server) as connection:
        if before:
            connection.sendall(b"GET /live HTTP/1.1\r\nHost: x\r\n\r\n")
            reply = b""
            while not reply.endswith(b"}"):
                reply += connection.recv(4096)
        connection.sendall(sent)
        assert is_closed(connection)


def test_a_request_may_take_longer_than_its_head(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sockets, "_HEAD_WITHIN", 0.3)
    with live_server(f"sqlite:///{tmp_path / 'pond.db'}") as server:
        body = {"queues": ["q"], "wait": 1}
        assert httpx.post(f"{server.url}/api/v1/claims", json=body, timeout=60).json() == {"claims": []}


@pytest.mark.parametrize("path", ["/api/v1/queues/q/messages", "/dashboard/login", "/nothing"])
def test_a_body_with_two_lengths_smuggles_no_request(tmp_path: Path, path: str) -> None:
    smuggled = b"GET /live HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"
    head = (
        f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1\r\ncontent-type: application/json\r\n"
        f"content-length: {5 + len(smuggled)}\r\ntransfer-encoding: chunked\r\n\r\n"
    )
    with live_server(f"sqlite:///{tmp_path / 'pond.db'}") as server, connected(server) as connection:
        connection.sendall(head.encode() + b"0\r\n\r\n" + smuggled)
        reply = b""
        while part := connection.recv(4096):
            reply += part
    assert reply.startswith(b"HTTP/1.1 400") and reply.count(b"HTTP/1.1") == 1
    assert b"both Content-Length and Transfer-Encoding" in reply
