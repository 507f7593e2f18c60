"""`millpond run` with one worker in this process, alone or under a supervisor."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import sys
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import msgspec

from millpond.cli.app import Declined
from millpond.cli.logs import LogFormat
from millpond.cli.run_console import configure_logging, show_status
from millpond.cli.run_options import RunOptions
from millpond.errors import MillpondError, StoreError, WorkerStuck
from millpond.pond import Millpond
from millpond.signals import stop_on_signals
from millpond.telemetry import Counters
from millpond.worker.processes import own_command
from millpond.worker.status import Status

log = logging.getLogger("millpond.run")

_STATUS_EVERY = 0.5
_CLOSE_WITHIN = 5.0


async def run_worker(pond: Millpond, options: RunOptions, supervised: str | None) -> int:
    number, pipe = (int(part) for part in supervised.split(":")) if supervised else (None, None)
    console = configure_logging(pond, options, number)
    counters = Counters()
    pond.telemetry.subscribe(counters)

    def status() -> Status:
        worker = pond.worker
        if worker is None:
            return Status(False, 0, counters.as_dict())
        return Status(worker.ready, worker.in_flight, counters.as_dict())

    def obstacle() -> str | None:
        return "it does not run" if pond.worker is None else pond.worker.obstacle

    def stop() -> None:
        if pond.worker is not None:
            pond.worker.stop()

    def announce_stop() -> None:
        if (worker := pond.worker) is not None:
            worker.announce_stop()

    if pipe is not None:
        reporting = _report_to_supervisor(pond, pipe, status)
    else:
        reporting = show_status(options, console, status, obstacle, lambda: {"in_flight": status().in_flight})
    async with reporting:
        queues = ", ".join(queue for s in pond.of_queues(options.queues) for queue in s.queues)
        log.info("started: %r at %s, queues %s", options.target, pond.url, queues)
        try:
            # This process is ours: handlers of libraries give way. A signal that arrives before the worker exists is
            # passed to it: the event loop calls `stop` later.
            with stop_on_signals(stop, announce_stop, replace=True):
                await pond.run(
                    signals=False,
                    queues=options.queues,
                    graceful_timeout=options.grace,
                    until_idle=options.until_idle,
                    end_when_stuck=options.end_when_stuck,
                    child_command=_child_command(options, number),
                    dead_after=options.dead_after,
                    cancel_cut_off=options.cancel_cut_off,
                )
        except WorkerStuck as e:
            log.error("%s", e)
            return 1
        except MillpondError as e:
            if options.log_format is LogFormat.JSON:  # stderr must contain only JSON objects
                log.error("%s", e)
                return 1 if isinstance(e, StoreError) else 2
            raise
        except Exception as e:
            log.exception("the worker failed")
            raise Declined(f"{type(e).__name__}: {e}") from e
        finally:
            with contextlib.suppress(MillpondError, TimeoutError):
                async with asyncio.timeout(_CLOSE_WITHIN):
                    await pond.close()
    log.info("stopped")
    return 0


def _child_command(options: RunOptions, number: int | None) -> list[str]:
    """The command of a child process for suspects; the number of its socket follows."""
    of = [] if number is None else ["--child-of", str(number)]
    return own_command(["run", options.target, *options.worker_options, *of, "--child"])


@asynccontextmanager
async def _report_to_supervisor(pond: Millpond, pipe: int, status: Callable[[], Status]) -> AsyncIterator[None]:
    """Send the status to the supervisor, and stop the pond when the supervisor is gone."""
    loop = asyncio.get_running_loop()
    os.set_blocking(pipe, False)

    def send_status() -> None:
        # The pipe is full or has no reader: the next line has the same counters.
        with contextlib.suppress(OSError):
            os.write(pipe, msgspec.json.encode(status()) + b"\n")

    async def send_repeatedly() -> None:
        while True:
            send_status()
            await asyncio.sleep(_STATUS_EVERY)

    def stop_with_supervisor() -> None:
        with contextlib.suppress(OSError, ValueError):
            while os.read(sys.stdin.fileno(), 4096):
                pass
        with contextlib.suppress(RuntimeError):  # the loop was closed
            loop.call_soon_threadsafe(pond.stop)

    threading.Thread(target=stop_with_supervisor, name="millpond-supervised", daemon=True).start()
    task = asyncio.create_task(send_repeatedly())
    try:
        yield
    finally:
        task.cancel()
        send_status()
