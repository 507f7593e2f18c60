"""How workers get on: one line that lives on a terminal, or a line in the log now and then."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from rich.console import Console
from rich.live import Live
from rich.text import Text

from millpond.worker.crew import Status
from millpond.worker.progress import EVERY, Teller, told


@asynccontextmanager
async def shown(status: Callable[[], Status], console: Console, *, every: float = EVERY) -> AsyncIterator[None]:
    """Show it as long as this lasts: on a terminal by a line that changes, elsewhere by lines in the log."""
    if console.is_terminal:
        teller = Teller(status)
        with Live(get_renderable=lambda: Text(teller.now()[1], "bold"), console=console, transient=True):
            yield
    else:
        async with told(status, every=every):
            yield
