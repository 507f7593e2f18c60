"""`millpond run` with several workers: their supervisor."""

from __future__ import annotations

import logging
import os

from rich.console import Console
from rich.text import Text

from millpond.cli.logs import LogFormat
from millpond.cli.run_console import show_status
from millpond.cli.run_options import RunOptions
from millpond.signals import stop_on_signals
from millpond.worker.processes import ProcessSupervisor, own_command, run_arguments
from millpond.worker.supervisor import Supervisor

log = logging.getLogger("millpond.run")


async def supervise(supervisor: Supervisor, what: str, options: RunOptions, console: Console) -> int:
    with stop_on_signals(supervisor.stop, replace=True):
        async with show_status(
            options,
            console,
            lambda: supervisor.status,
            lambda: None if supervisor.status.ready else "no worker is ready",
            lambda: {"workers": supervisor.running},
        ):
            log.info("started: %s for %r", what, options.target)
            code = await supervisor.run()
        log.info("stopped")
    return code


def process_supervisor(options: RunOptions, workers: int, console: Console) -> ProcessSupervisor:
    live = console.is_terminal and options.log_format is LogFormat.TEXT

    def show(text: str) -> None:
        console.print(Text.from_ansi(text), soft_wrap=True, highlight=False)

    if live:
        os.environ["FORCE_COLOR"] = "1"  # the workers write to a pipe, which this process prints on a terminal
    grace, until_idle, worker_options = options.grace, options.until_idle, options.worker_options
    arguments = run_arguments(
        options.target, options.queues, grace=grace, until_idle=until_idle, worker_options=worker_options
    )
    on_log = show if live else None
    return ProcessSupervisor(own_command(arguments), workers, grace=grace, until_idle=until_idle, on_log=on_log)
