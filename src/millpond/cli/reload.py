"""`millpond run --reload`: start the worker again when a Python file of the current folder changes. For development."""

from __future__ import annotations

import contextlib
import logging
import signal
import subprocess
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import FrameType

from millpond.errors import MissingDriver
from millpond.worker.processes import own_command

log = logging.getLogger("millpond.run")

_END_WITHIN = 20.0
"""Seconds for the worker to end: its grace period, and some more."""


def run_and_reload(arguments: Sequence[str], folder: Path, grace: float) -> int:
    """Run `millpond` with these arguments until a signal; start it again after each change. Returns the exit code.

    A worker that ends by itself, such as after an error in a module, is started again by the next change.
    """
    try:
        from watchfiles import PythonFilter, watch
    except ModuleNotFoundError:
        raise MissingDriver('--reload needs the package watchfiles; pip install "millpond[reload]"') from None
    stop = threading.Event()
    workers: list[subprocess.Popen[bytes]] = []
    with _stop_on_signals(stop, workers):
        changes = watch(folder, watch_filter=PythonFilter(), stop_event=stop, raise_interrupt=False, debounce=200)
        while True:
            # In its own group: Ctrl-C would reach it twice, from the terminal and by `_end`, and cut handlers off.
            worker = subprocess.Popen(own_command(arguments), process_group=0)
            workers[:] = [worker]
            changed = next(changes, None)
            if changed is not None:
                files = ", ".join(sorted(Path(path).name for _, path in changed))
                log.info("reload: %s changed", files)
            code = _end(worker, grace)
            if changed is None:
                return code


def _end(worker: subprocess.Popen[bytes], grace: float) -> int:
    if worker.poll() is None:
        worker.terminate()
    try:
        return worker.wait(grace + _END_WITHIN)
    except subprocess.TimeoutExpired:
        worker.kill()
        return worker.wait()


@contextlib.contextmanager
def _stop_on_signals(stop: threading.Event, workers: Sequence[subprocess.Popen[bytes]]) -> Iterator[None]:
    """The second signal is passed on: it interrupts handlers. The end of the terminal is a signal too."""

    def on_signal(number: int, frame: FrameType | None) -> None:
        if stop.is_set():
            for worker in workers:
                worker.terminate()
        stop.set()

    before = {number: signal.signal(number, on_signal) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
