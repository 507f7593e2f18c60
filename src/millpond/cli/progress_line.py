"""Status of workers: one changing line on a terminal, otherwise a log line every few seconds."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from rich.console import Console
from rich.live import Live
from rich.text import Text

from millpond.worker.status import EVERY, Status, StatusLog, log_status


@asynccontextmanager
async def show(status: Callable[[], Status], console: Console, *, every: float = EVERY) -> AsyncIterator[None]:
    """Show the status while the context is open."""
    if console.is_terminal:
        status_log = StatusLog(status)
        with Live(get_renderable=lambda: Text(status_log.line(), "bold"), console=console, transient=True):
            yield
    else:
        async with log_status(status, every=every):
            yield
