"""The health endpoint of a worker, asked by programs that speak no HTTP."""

from __future__ import annotations

import asyncio
import logging

import pytest

from millpond.cli import health


@pytest.mark.parametrize("sent", [b"x" * 100_000, b"\r\n\r\n", b"GET\r\n\r\n", b"\xff /live HTTP/1.1\r\n\r\n"])
async def test_a_request_of_any_form_ends_without_an_error(sent: bytes, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.ERROR)
    async with health.serve(health.LOOPBACK, 0, lambda: None, dict) as port:
        reader, writer = await asyncio.open_connection(health.LOOPBACK, port)
        writer.write(sent)
        async with asyncio.timeout(60):
            try:
                answer = await reader.read()
            except ConnectionError:  # it was closed while more was sent
                answer = b""
        writer.close()
    assert not answer or answer.startswith(b"HTTP/1.1 405 ")
    assert caplog.records == []
