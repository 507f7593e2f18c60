"""Output of `millpond run`: its log, and its status as a line on the terminal and over HTTP."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

from rich.console import Console

from millpond.cli import health, logs, progress_line
from millpond.cli.app import Declined
from millpond.cli.logs import LogFormat
from millpond.cli.run_options import RunOptions
from millpond.pond import Millpond
from millpond.worker.status import Status

log = logging.getLogger("millpond.run")


class _Console(Console):
    def on_broken_pipe(self) -> None:
        """Continue without output: the reader of the log is gone, but the work must end in an orderly way."""


def configure_logging(pond: Millpond, options: RunOptions, worker: int | None) -> Console:
    console = _Console(stderr=True)
    logs.configure(options.log_format, options.log_level, console, worker=worker, redact=pond.redacted)
    if options.log_format is LogFormat.JSON:  # only JSON objects, no progress line
        console = _Console(stderr=True, force_terminal=False)
    return console


def configure_reload_log(options: RunOptions) -> None:
    logs.configure(options.log_format, options.log_level, _Console(stderr=True), worker=None)


@asynccontextmanager
async def show_status(
    options: RunOptions,
    console: Console,
    status: Callable[[], Status],
    obstacle: Callable[[], str | None],
    facts: Callable[[], dict[str, Any]],
) -> AsyncIterator[None]:
    """Show the status on the console and, with --health-port, over HTTP with these facts."""
    async with AsyncExitStack() as stack:
        if options.health_port is not None:
            serving = health.serve(options.health_host, options.health_port, obstacle, facts)
            try:
                port = await stack.enter_async_context(serving)
            except OSError as e:
                where = f"--health-host {options.health_host} --health-port {options.health_port}"
                raise Declined(f"{where}: {e.strerror or e}") from e
            host = f"[{options.health_host}]" if ":" in options.health_host else options.health_host
            log.info("health at http://%s:%d/live and /ready", host, port, extra={"port": port})
        await stack.enter_async_context(progress_line.show(status, console))
        yield
