"""Run a coroutine and end the process, although threads may still run."""

from __future__ import annotations

import asyncio
import logging
import os
import threading
import time
from collections.abc import Coroutine
from typing import Any

import typer

log = logging.getLogger("millpond.run")

_EXIT_WITHIN = 5.0
"""Seconds that a finished process waits for its threads."""


def run_to_end(work: Coroutine[Any, Any, int]) -> None:
    """Run the coroutine, then exit: no thread, of the event loop or another, may keep the process alive."""
    code, closing = 1, None
    try:
        with asyncio.Runner() as runner:
            try:
                code = runner.run(work)
            finally:
                closing = threading.Timer(_EXIT_WITHIN, _exit_with_threads, [code])
                closing.daemon = True
                closing.start()
    finally:
        if closing is not None:
            closing.cancel()
        if any(not thread.daemon for thread in threading.enumerate() if thread is not threading.main_thread()):
            threading.Thread(target=_exit_after_main_thread, args=[code], daemon=True).start()
    if code:
        raise typer.Exit(code)


def _exit_after_main_thread(code: int) -> None:
    threading.main_thread().join()
    time.sleep(_EXIT_WITHIN)
    _exit_with_threads(code)


def _exit_with_threads(code: int) -> None:
    log.error("threads still run; exiting without them")
    os._exit(code)
