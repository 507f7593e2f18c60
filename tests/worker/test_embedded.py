"""A worker inside a web server: one signal ends both, and handlers finish first."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import textwrap
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from millpond import Millpond, State
from servers.ports import free_port
from tests.waiting import ended, until
from tests.worker.conftest import counts, on

APP = """
import asyncio, os, signal, sys
from contextlib import asynccontextmanager
from fastapi import FastAPI
from millpond import Millpond

pond = Millpond({url!r})


@pond.subscriber("orders")
async def ship(order: dict) -> None:
    open("started", "w").close()
    while not os.path.exists(order["waits for"]):
        await asyncio.sleep(0.02)


@asynccontextmanager
async def lifespan(app):
    running = asyncio.create_task(pond.run())
    yield
    pond.stop()
    await running
    await pond.close()
    open("stopped", "w").close()


app = FastAPI(lifespan=lifespan)


@app.post("/orders")
async def take(order: dict) -> str:
    return str(await pond.publish("orders", order))
"""


@pytest.fixture
def server(tmp_path: Path, url: str) -> Iterator[tuple[subprocess.Popen[bytes], str]]:
    (tmp_path / "web.py").write_text(textwrap.dedent(APP).replace("{url!r}", repr(url)))
    port = free_port()
    process = subprocess.Popen(
        [sys.executable, "-m", "uvicorn", "web:app", "--port", str(port)], cwd=tmp_path, stdin=subprocess.DEVNULL
    )
    yield process, f"http://127.0.0.1:{port}"
    if process.poll() is None:
        process.kill()
        process.wait()


@on("sqlite", "postgresql")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_one_signal_ends_the_server_and_its_worker(
    pond: Millpond, server: tuple[subprocess.Popen[bytes], str], tmp_path: Path, number: signal.Signals
) -> None:
    process, at = server
    await pond.transport  # its tables

    def order() -> bool:
        request = urllib.request.Request(
            f"{at}/orders", b'{"waits for": "go on"}', {"content-type": "application/json"}, method="POST"
        )
        try:
            with urllib.request.urlopen(request, timeout=10):
                return True
        except OSError:
            return False

    await until(lambda: asyncio.to_thread(order))
    await until((tmp_path / "started").exists)
    os.kill(process.pid, number)
    await asyncio.sleep(0.2)
    assert process.poll() is None, "the handler finishes first"
    (tmp_path / "go on").touch()
    await ended(process)
    assert (tmp_path / "stopped").exists(), "the lifespan came to its end"
    assert await counts(pond, "orders") == {State.COMPLETED: 1}
