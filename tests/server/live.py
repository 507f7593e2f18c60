"""A server on a real socket, in a thread with its own event loop."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import millpond
from millpond.server.run_server import RunningServer, run
from millpond.server.settings import ServerSettings


@contextmanager
def live_server(url: str, **settings: Any) -> Iterator[RunningServer]:
    """A server of this database until the context ends."""
    started = threading.Event()
    found: list[RunningServer] = []
    failure: list[BaseException] = []
    stop: list[Any] = []

    async def main() -> None:
        stopped = asyncio.Event()
        loop = asyncio.get_running_loop()
        stop.append(lambda: loop.call_soon_threadsafe(stopped.set))
        transport = await millpond.connect(url, migrate=True)

        def begin(running: RunningServer) -> None:
            found.append(running)
            started.set()

        try:
            await run(transport, ServerSettings(**{"port": 0, **settings}), begin, stopped)
        finally:
            await transport.close()

    def thread() -> None:
        try:
            asyncio.run(main())
        except BaseException as e:
            failure.append(e)
        finally:
            started.set()

    running = threading.Thread(target=thread, name="server")
    running.start()
    started.wait()
    try:
        if not found:
            raise failure[0]
        yield found[0]
    finally:
        if found:
            stop[0]()
        running.join()
    if failure:
        raise failure[0]
