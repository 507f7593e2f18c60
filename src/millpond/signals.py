"""SIGTERM and SIGINT stop workers. Signals that the surrounding program handles are left to it."""

from __future__ import annotations

import asyncio
import functools
import logging
import os
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any, NamedTuple

log = logging.getLogger("millpond")

_SIGNALS = (signal.SIGTERM, signal.SIGINT)


class _Stop(NamedTuple):
    loop: asyncio.AbstractEventLoop
    call: Callable[[], None]
    at_once: Callable[[], None] | None


class _Stops:
    """The functions that a signal calls, and the handlers that were set before the first of them."""

    def __init__(self) -> None:
        self._stops: list[_Stop] = []
        self._before: dict[signal.Signals, Any] = {}
        self._reader: _SignalReader | None = None

    def add(self, stop: _Stop, *, replace: bool) -> None:
        self._stops.append(stop)
        for number in _SIGNALS:
            handler = signal.getsignal(number)
            if handler == self._on_signal:
                continue
            if _is_foreign(handler) and not replace:
                log.debug("%s has a handler already and is left to it", number.name)
            else:
                self._before[number] = handler
                signal.signal(number, self._on_signal)
        if self._before and self._reader is None:
            self._reader = _SignalReader(self._at_once)

    def remove(self, stop: _Stop) -> None:
        """Forget one function. After the last one, restore the handlers, unless others were set meanwhile."""
        self._stops.remove(stop)
        if self._stops:
            return
        for number, handler in self._before.items():
            # None: it was not set from Python, and cannot be set again.
            if signal.getsignal(number) == self._on_signal and handler is not None:
                signal.signal(number, handler)
        self._before.clear()
        if self._reader is not None:
            self._reader.close()
            self._reader = None

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        for stop in self._stops:
            stop.loop.call_soon_threadsafe(stop.call)

    def _at_once(self, number: int) -> None:
        if number in self._before:
            for stop in list(self._stops):
                if stop.at_once is not None:
                    stop.at_once()


class _SignalReader(threading.Thread):
    """Calls a function with the number of each signal, in a thread, also while the event loop is blocked.

    Python writes the number to the wake-up socket at once, whatever the main thread does. It is passed on to the socket
    that was set before, such as that of an event loop.
    """

    def __init__(self, call: Callable[[int], None]) -> None:
        super().__init__(name="millpond-signals", daemon=True)
        self._call = call
        self._ours, self._pythons = socket.socketpair()
        self._pythons.setblocking(False)
        self._before = signal.set_wakeup_fd(self._pythons.fileno(), warn_on_full_buffer=False)
        self.start()

    def run(self) -> None:
        while arrived := self._ours.recv(64):
            for number in arrived:
                self._call(number)
            with suppress(OSError):  # no socket was set, or it is closed
                os.write(self._before, arrived)

    def close(self) -> None:
        present = signal.set_wakeup_fd(-1)
        # Another one than ours was set by another part of the program meanwhile.
        restored = self._before if present == self._pythons.fileno() else present
        with suppress(OSError, ValueError):  # it was closed meanwhile
            signal.set_wakeup_fd(restored)
        self._pythons.close()
        self.join()
        self._ours.close()


def _is_foreign(handler: Any) -> bool:
    """Whether the program itself handles the signal. None: it was not set from Python.

    `asyncio.run` handles SIGINT by cancelling its main task, which is no decision of the program.
    """
    if isinstance(handler, functools.partial) and isinstance(getattr(handler.func, "__self__", None), asyncio.Runner):
        return False
    return handler not in (signal.SIG_DFL, signal.SIG_IGN, signal.default_int_handler)


_stops = _Stops()


@contextmanager
def stop_on_signals(
    stop: Callable[[], None], at_once: Callable[[], None] | None = None, *, replace: bool = False
) -> Iterator[None]:
    """Call `stop` on SIGTERM and SIGINT while the context lasts. Several contexts share the signals.

    A signal that has a handler already, such as a web server's, keeps it. With `replace` its handler is replaced: in
    our own commands, where it is that of a library such as PySpark. Without effect outside the main thread.
    `at_once` is called too, in another thread, and does not wait for an event loop that is blocked.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    ours = _Stop(asyncio.get_running_loop(), stop, at_once)
    _stops.add(ours, replace=replace)
    try:
        yield
    finally:
        _stops.remove(ours)
