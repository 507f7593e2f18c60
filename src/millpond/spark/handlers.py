"""Handlers on a cluster: a pond's subscribers at work on the executors, in long-running tasks.

Each task keeps an ordinary worker process (see task.py); what it claims, settles, retries and archives, and what
happens when it dies, is as everywhere else. Spark places the tasks, and moves them when an executor dies.
"""

from __future__ import annotations

import asyncio
import signal
import sys
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

from millpond.clock import Seconds
from millpond.errors import InvalidOption, MillpondError, Unsupported, not_supported
from millpond.pond import Millpond
from millpond.spark.local import refuse_file
from millpond.spark.tasks import Tasks
from millpond.transport import Capability
from millpond.worker.crew import WRONG_COMMAND
from millpond.worker.progress import told
from millpond.worker.subscription import seconds, whole

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
    """Run a pond's subscribers on the executors of a session, until told to stop by SIGTERM or SIGINT.

    The executors import the pond: `at` says from where, `shop.orders:pond`, if it is not the module that declares
    its subscribers. There are as many `tasks` as cores unless given; each takes a core, and has `max_workers` of
    each subscriber. Tasks connect to the driver, at a `port` of its own choice unless given.
    """
    crew = crew_for(
        pond,
        spark,
        at=at,
        tasks=tasks,
        queues=queues,
        grace=seconds(graceful_timeout),
        until_idle=until_idle,
        port=port,
    )
    code = _run_here(crew) if _can_run_here() else _run_beside(crew)
    if code:
        kind = InvalidOption if code == WRONG_COMMAND else MillpondError
        raise kind(f"the workers of {at or reference(pond)} ended: {crew.last_words or f'exit code {code}'}")


def crew_for(
    pond: Millpond,
    spark: SparkSession,
    *,
    at: str | None,
    tasks: int | None,
    queues: Sequence[str] | None,
    grace: float,
    until_idle: bool,
    port: int = 0,
    logging_options: Sequence[str] = (),
) -> Tasks:
    """Workers to be run, once all that can be wrong has been looked for."""
    try:
        context = spark.sparkContext
    except Exception as e:  # whatever Spark Connect says to that; it differs by version
        raise Unsupported("handlers run below the driver itself; this session is a client of Spark Connect") from e
    subscriptions = pond.of_queues(queues)
    if not subscriptions:
        raise InvalidOption("there is nothing to do: the pond has no subscriber")
    if pond.url.scheme == "memory":
        raise not_supported("handlers on Spark with memory://", Capability.SHARED)
    refuse_file(pond.url, context.master)
    tasks = context.defaultParallelism if tasks is None else tasks
    whole("tasks", tasks, 1)
    target = at or reference(pond)
    # Every queue by its name, so that an executor whose module knows fewer says so.
    names = ",".join(queue for s in subscriptions for queue in s.queues)
    arguments = ["run", target, "--queues", names, "--graceful-timeout", f"{grace}s", *logging_options]
    if until_idle:
        arguments.append("--until-idle")
    return Tasks(context, target, arguments, tasks, grace=grace, until_idle=until_idle, port=port)


def reference(pond: Millpond) -> str:
    """How executors import a pond: from a module that declares subscribers of it, or else from one that has it."""
    homes = [getattr(s.handler, "__module__", "") for s in pond.subscriptions]
    for home in dict.fromkeys((*homes, *sys.modules)):
        module = sys.modules.get(home)
        found = [name for name, value in list(getattr(module, "__dict__", {}).items()) if value is pond]
        if found and home != "__main__":
            return f"{home}:{found[0]}"
        if found and (spec := getattr(module, "__spec__", None)) is not None:  # started as `python -m shop.orders`
            return f"{spec.name}:{found[0]}"
    raise InvalidOption(
        "executors import the pond by its name, and no module has it under one: make it a global of a module, and ship "
        "that with --py-files or addPyFile; or say where it is, at='shop.orders:pond'"
    )


# --- in a program of somebody else's ----------------------------------------------------------------


def _can_run_here() -> bool:
    """Signals reach the main thread only, and a notebook has an event loop there already."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return threading.current_thread() is threading.main_thread()
    return False


def _run_here(crew: Tasks) -> int:
    async def work() -> int:
        loop = asyncio.get_running_loop()
        before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
        for number in before:
            loop.add_signal_handler(number, crew.stop)
        try:
            async with told(lambda: crew.status):
                return await crew.run()
        finally:
            for number, handler in before.items():
                loop.remove_signal_handler(number)
                signal.signal(number, handler)

    return asyncio.run(work())


def _run_beside(crew: Tasks) -> int:
    """In a thread of its own; an interrupted cell of a notebook stops it."""
    loops: list[asyncio.AbstractEventLoop] = []

    async def work() -> int:
        loops.append(asyncio.get_running_loop())
        async with told(lambda: crew.status):
            return await crew.run()

    with ThreadPoolExecutor(1, thread_name_prefix="millpond-spark-run") as thread:
        working = thread.submit(lambda: asyncio.run(work()))
        while True:
            try:
                return working.result()
            except KeyboardInterrupt:
                for loop in loops:
                    loop.call_soon_threadsafe(crew.stop)
