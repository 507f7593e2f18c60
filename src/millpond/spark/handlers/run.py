"""Handlers on a cluster: a pond's subscribers run on the executors, in long-running tasks.

Each task supervises an ordinary worker process (see executor.py), which claims, settles, retries, archives and dies as
everywhere else. Spark places the tasks and moves them when an executor dies.
"""

from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

from millpond import transports
from millpond.checks import integer
from millpond.clock import Seconds, seconds
from millpond.errors import InvalidOption, MillpondError, Unsupported, not_supported
from millpond.loop import running_loop
from millpond.pond import Millpond
from millpond.seam.transport import Capability
from millpond.signals import stop_on_signals
from millpond.spark.handlers.driver import TaskSupervisor
from millpond.spark.sessions import refuse_file
from millpond.worker.processes import run_arguments
from millpond.worker.status import log_status
from millpond.worker.supervisor import WRONG_COMMAND

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


def run(
    pond: Millpond,
    spark: SparkSession,
    *,
    at: str | None = None,
    tasks: int | None = None,
    queues: Sequence[str] | None = None,
    graceful_timeout: Seconds = 15.0,
    until_idle: bool = False,
    port: int = 0,
) -> None:
    """Run a pond's subscribers on the executors of a session until SIGTERM or SIGINT.

    The executors import the pond from `at`, such as `shop.orders:pond`; the default is the module that declares its
    subscribers. `tasks` defaults to the number of cores; each task takes one core and runs `max_workers` of each
    subscriber. Tasks connect to the driver at `port`, by default any free one.
    """
    supervisor = supervisor_for(
        pond,
        spark,
        at=at,
        tasks=tasks,
        queues=queues,
        grace=seconds(graceful_timeout),
        until_idle=until_idle,
        port=port,
    )
    code = _run(supervisor)
    if code:
        kind = InvalidOption if code == WRONG_COMMAND else MillpondError
        raise kind(f"the workers of {at or reference(pond)} ended: {supervisor.last_output or f'exit code {code}'}")


def supervisor_for(
    pond: Millpond,
    spark: SparkSession,
    *,
    at: str | None,
    tasks: int | None,
    queues: Sequence[str] | None,
    grace: float,
    until_idle: bool,
    port: int = 0,
    worker_options: Sequence[str] = (),
) -> TaskSupervisor:
    """Workers that are ready to run. All arguments are checked before."""
    try:
        context = spark.sparkContext
    except Exception as e:  # the error of Spark Connect differs by version
        raise Unsupported("handlers need the Spark driver itself; this session is a client of Spark Connect") from e
    subscriptions = pond.of_queues(queues)
    if not subscriptions:
        raise InvalidOption("the pond has no subscriber: there is nothing to run")
    if not transports.is_shared(pond.url.raw):
        raise not_supported(f"handlers on Spark with {pond.url.scheme}://", Capability.SHARED)
    refuse_file(pond.url, context.master)
    tasks = context.defaultParallelism if tasks is None else tasks
    integer(tasks, "tasks", 1)
    target = at or reference(pond)
    # Every queue by its name: an executor whose module has fewer queues then raises an error.
    names = [queue for s in subscriptions for queue in s.queues]
    arguments = run_arguments(target, names, grace=grace, until_idle=until_idle, worker_options=worker_options)
    return TaskSupervisor(context, target, arguments, tasks, grace=grace, until_idle=until_idle, port=port)


def reference(pond: Millpond) -> str:
    """The name by which executors import a pond, preferably in a module that declares its subscribers."""
    homes = [getattr(s.handler, "__module__", "") for s in pond.subscriptions]
    for home in dict.fromkeys((*homes, *sys.modules)):
        module = sys.modules.get(home)
        found = [name for name, value in list(getattr(module, "__dict__", {}).items()) if value is pond]
        if found and home != "__main__":
            return f"{home}:{found[0]}"
        if found and (spec := getattr(module, "__spec__", None)) is not None:  # started as `python -m shop.orders`
            return f"{spec.name}:{found[0]}"
    raise InvalidOption(
        "executors import the pond by its name, but no module has it as a global: make it a global of a module, and "
        "ship that with --py-files or addPyFile; or pass its name, at='shop.orders:pond'"
    )


def _run(supervisor: TaskSupervisor) -> int:
    loops: list[asyncio.AbstractEventLoop] = []

    async def work() -> int:
        loops.append(asyncio.get_running_loop())
        with stop_on_signals(supervisor.stop, replace=True):
            async with log_status(lambda: supervisor.status):
                return await supervisor.run()

    if running_loop() is None and threading.current_thread() is threading.main_thread():
        return asyncio.run(work())
    # Only the main thread receives signals, and a notebook runs an event loop there. Interrupting its cell stops the
    # workers too.
    with ThreadPoolExecutor(1, thread_name_prefix="millpond-spark-run") as thread:
        working = thread.submit(lambda: asyncio.run(work()))
        while True:
            try:
                return working.result()
            except KeyboardInterrupt:
                for loop in loops:
                    loop.call_soon_threadsafe(supervisor.stop)
