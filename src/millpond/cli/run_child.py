"""`millpond run` as a child process of a worker, for its suspects. It ends with the worker, and for no other reason."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import logging
import signal
import socket
import sys

from millpond.errors import MillpondError
from millpond.pond import Millpond

_PR_SET_PDEATHSIG = 1
_CLOSE_WITHIN = 5.0

log = logging.getLogger("millpond.run")


def bind_to_worker(number: int) -> socket.socket:
    """The socket to the worker, after this process was made to end with it.

    The end of the socket shows the worker's death too, but not while a handler holds the interpreter's lock.
    """
    worker = socket.socket(fileno=number)
    worker.set_inheritable(False)
    for stop in (signal.SIGTERM, signal.SIGINT):  # a service manager sends them to all processes; the worker decides
        signal.signal(stop, lambda *_: None)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    return worker


async def run(pond: Millpond, worker: socket.socket) -> int:
    """Run suspects until the worker closes the socket; the exit code."""
    try:
        await pond.run_suspects(worker)
    except MillpondError as e:
        log.error("%s", e)
        return 1
    except Exception:  # of a hook
        log.exception("the child process failed")
        return 1
    finally:
        with contextlib.suppress(MillpondError, TimeoutError):
            async with asyncio.timeout(_CLOSE_WITHIN):
                await pond.close()
    return 0
