"""`millpond run`: a pond's subscribers at work, in one process or in several under a supervisor."""

import asyncio
import contextlib
import importlib
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import AsyncExitStack, asynccontextmanager
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer
from rich.console import Console
from rich.text import Text

from millpond.cli import health, logs, on_spark, progress, values
from millpond.cli.app import Refused, app
from millpond.cli.spark import Conf, Master
from millpond.cli.supervise import Supervisor
from millpond.errors import InvalidOption, MillpondError, StoreError
from millpond.pond import Millpond
from millpond.telemetry import Counters
from millpond.worker.crew import Crew, Status
from millpond.worker.process import own_command

log = logging.getLogger("millpond.run")

_STATUS_EVERY = 0.5
_EXIT_WITHIN = 5.0
"""Seconds after which a process that has finished does not wait for threads any more."""


class Where(StrEnum):
    HERE = "here"
    SPARK = "spark"


class LogFormat(StrEnum):
    TEXT = "text"
    JSON = "json"


class LogLevel(StrEnum):
    DEBUG = "debug"
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"


class Options(msgspec.Struct, frozen=True):
    """What both kinds of processes need."""

    target: str
    queues: list[str] | None
    grace: float
    log_format: LogFormat
    log_level: LogLevel
    health_port: int | None
    until_idle: bool


@app.command("run")
def run(
    target: Annotated[str, typer.Argument(metavar="MODULE[:POND]", help="Where the pond is, e.g. shop.orders:pond.")],
    workers: Annotated[int, typer.Option(min=1, max=1000, help="So many processes, with a supervisor.")] = 1,
    queues: Annotated[
        str | None, typer.Option(metavar="A,B", help="Only these queues of the pond's subscribers.", show_default=False)
    ] = None,
    graceful_timeout: Annotated[
        str, typer.Option(metavar="DURATION", help="How long running handlers may take to finish at a stop.")
    ] = "15s",
    log_format: Annotated[LogFormat, typer.Option(help="Lines for people, or JSON objects.")] = LogFormat.TEXT,
    log_level: Annotated[LogLevel, typer.Option(help="What is logged.")] = LogLevel.INFO,
    health_port: Annotated[
        int | None,
        typer.Option(help="Answer /live and /ready on loopback; 0: any port.", show_default=False),
    ] = None,
    until_idle: Annotated[bool, typer.Option(help="End when nothing is due.")] = False,
    on: Annotated[Where, typer.Option(help="On this machine, or on the executors of a Spark cluster.")] = Where.HERE,
    master: Master = "local[*]",
    tasks: Annotated[
        int | None,
        typer.Option(
            min=1, help="With --on spark: so many workers; as many as cores unless given.", show_default=False
        ),
    ] = None,
    py_files: Annotated[
        str | None, typer.Option(metavar="A,B", help="With --on spark: modules to ship.", show_default=False)
    ] = None,
    archives: Annotated[
        str | None, typer.Option(metavar="A,B", help="With --on spark: archives to ship.", show_default=False)
    ] = None,
    conf: Conf = None,
    driver_port: Annotated[int, typer.Option(help="With --on spark: where tasks find the driver; 0: any port.")] = 0,
    supervised: Annotated[str | None, typer.Option(hidden=True)] = None,
) -> None:
    """Run a pond's subscribers until told to stop.

    SIGTERM and SIGINT let running handlers finish, a second one interrupts them. Exit code 0: stopped as told;
    1: the database, a hook or a worker failed; 2: the command was wrong.
    """
    grace = values.duration(graceful_timeout, "--graceful-timeout")
    assert grace is not None
    names = None if queues is None else _names(queues)
    if names == []:
        raise InvalidOption("--queues names no queue")
    options = Options(target, names, grace.total_seconds(), log_format, log_level, health_port, until_idle)
    cluster = on_spark.Cluster(master, tasks, _names(py_files), _names(archives), conf or [], driver_port)
    if on is Where.SPARK:
        if workers != 1:
            raise InvalidOption("--workers is for this machine; with --on spark say --tasks")
        on_spark.find_modules_in(cluster.py_files)
    elif cluster != on_spark.Cluster():
        raise InvalidOption("--master, --tasks, --py-files, --archives, --conf and --driver-port are for --on spark")
    pond = load(target)
    if not pond.of_queues(names):  # which also says what is wrong with the names
        raise InvalidOption(f"there is nothing to do: {target} has no subscriber")
    if health_port is not None and not 0 <= health_port <= 65535:
        raise InvalidOption(f"--health-port must be from 0 to 65535, not {health_port}")
    if on is Where.SPARK:
        console = _logging(pond, options, None)
        with on_spark.session(pond, target, cluster) as spark:
            crew = on_spark.crew(pond, spark, cluster, options)
            _finish(_keep(crew, f"{crew.size} tasks of {spark.sparkContext.master}", options, console))
    elif workers == 1 or supervised is not None:
        _finish(_work(pond, options, supervised))
    else:
        console = _logging(pond, options, None)
        _finish(_keep(_supervisor(options, workers, console), f"{workers} workers", options, console))


def load(target: str) -> Millpond:
    """The pond at `module:name`, found from the current folder; `name` is `pond` unless given."""
    module_name, _, path = target.partition(":")
    path = path or "pond"
    if str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    if module_name.endswith(".py") or "/" in module_name:
        raise InvalidOption(
            f"{module_name!r} is a file; give a module's name, as you would import it: shop.orders:pond"
        )
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as e:
        if e.name is not None and (module_name == e.name or module_name.startswith(f"{e.name}.")):
            raise InvalidOption(
                f"there is no module {e.name!r}, here in {Path.cwd()} or among what is installed"
            ) from None
        raise InvalidOption(f"importing {module_name!r} failed: {type(e).__name__}: {e}") from e
    except ValueError as e:
        raise InvalidOption(f"{module_name!r} is no module's name: {e}") from None
    except Exception as e:
        raise InvalidOption(f"importing {module_name!r} failed: {type(e).__name__}: {e}") from e
    pond: Any = module
    for part in path.split("."):
        try:
            pond = getattr(pond, part)
        except AttributeError:
            there = ", ".join(sorted(name for name, value in vars(module).items() if isinstance(value, Millpond)))
            raise InvalidOption(
                f"the module {module_name!r} has no {path!r}"
                + (f"; its ponds are: {there}" if there else "; it has no Millpond at all")
            ) from None
    if not isinstance(pond, Millpond):
        raise InvalidOption(f"{target} is no Millpond but a {type(pond).__name__}")
    return pond


# --- one process ------------------------------------------------------------------------------------


async def _work(pond: Millpond, options: Options, supervised: str | None) -> int:
    number, pipe = (int(part) for part in supervised.split(":")) if supervised else (None, None)
    console = _logging(pond, options, number)
    counters = Counters()
    pond.telemetry.subscribe(counters)

    def status() -> Status:
        worker = pond.worker
        if worker is None:
            return Status(False, 0, counters.as_dict())
        return Status(worker.ready, worker.in_flight, counters.as_dict())

    async with AsyncExitStack() as stack:
        if pipe is not None:
            await stack.enter_async_context(_told_to_the_supervisor(pond, pipe, status))
        else:
            await _health(stack, options, lambda: status().ready, lambda: {"in_flight": status().in_flight})
            await stack.enter_async_context(progress.shown(status, console))
        log.info("%r serves %s", options.target, ", ".join(q for s in pond.of_queues(options.queues) for q in s.queues))
        try:
            await pond.run(queues=options.queues, graceful_timeout=options.grace, until_idle=options.until_idle)
        except MillpondError as e:
            if options.log_format is LogFormat.JSON:  # where nothing but objects is expected
                log.error("%s", e)
                return 1 if isinstance(e, StoreError) else 2
            raise
        except Exception as e:
            log.exception("the worker failed")
            raise Refused(f"{type(e).__name__}: {e}") from e
        finally:
            with contextlib.suppress(MillpondError, TimeoutError):
                async with asyncio.timeout(_EXIT_WITHIN):
                    await pond.close()
    log.info("stopped")
    return 0


@asynccontextmanager
async def _told_to_the_supervisor(pond: Millpond, pipe: int, status: Callable[[], Status]) -> AsyncIterator[None]:
    """Tell how it goes, and stop when the supervisor is no more."""
    loop = asyncio.get_running_loop()
    os.set_blocking(pipe, False)

    def tell() -> None:
        # A full pipe, or nobody there to read: the next line tells the same.
        with contextlib.suppress(OSError):
            os.write(pipe, msgspec.json.encode(status()) + b"\n")

    async def go_on() -> None:
        while True:
            tell()
            await asyncio.sleep(_STATUS_EVERY)

    def wait_for_the_end() -> None:
        with contextlib.suppress(OSError, ValueError):
            while os.read(sys.stdin.fileno(), 4096):
                pass
        with contextlib.suppress(RuntimeError):  # the loop was closed
            loop.call_soon_threadsafe(pond.stop)

    threading.Thread(target=wait_for_the_end, name="millpond-supervised", daemon=True).start()
    task = asyncio.create_task(go_on())
    try:
        yield
    finally:
        task.cancel()
        tell()


# --- several ----------------------------------------------------------------------------------------


async def _keep(crew: Crew, what: str, options: Options, console: Console) -> int:
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, crew.stop)
    async with AsyncExitStack() as stack:
        await _health(stack, options, lambda: crew.status.ready, lambda: {"workers": crew.running})
        await stack.enter_async_context(progress.shown(lambda: crew.status, console))
        log.info("%s for %r", what, options.target)
        code = await crew.run()
    log.info("stopped")
    return code


def _supervisor(options: Options, workers: int, console: Console) -> Supervisor:
    live = console.is_terminal and options.log_format is LogFormat.TEXT

    def say(text: str) -> None:
        console.print(Text.from_ansi(text), soft_wrap=True, highlight=False)

    if live:
        os.environ["FORCE_COLOR"] = "1"  # the workers' lines go through us to the terminal
    return Supervisor(
        own_command(_arguments(options)),
        workers,
        grace=options.grace,
        until_idle=options.until_idle,
        say=say if live else None,
    )


def _arguments(options: Options) -> list[str]:
    arguments = ["run", options.target, "--graceful-timeout", f"{options.grace}s"]
    arguments += ["--log-format", options.log_format, "--log-level", options.log_level]
    if options.queues is not None:
        arguments += ["--queues", ",".join(options.queues)]
    if options.until_idle:
        arguments.append("--until-idle")
    return arguments


# --- both -------------------------------------------------------------------------------------------


def _names(text: str | None) -> list[str]:
    return [name.strip() for name in (text or "").split(",") if name.strip()]


class _Console(Console):
    def on_broken_pipe(self) -> None:
        """Whoever read our log is dead. The work goes on, to its end in good order."""


def _logging(pond: Millpond, options: Options, worker: int | None) -> Console:
    console = _Console(stderr=True)
    secrets = [secret for secret in (pond.url.password,) if secret]
    logs.configure(options.log_format.value, options.log_level.value, console, secrets=secrets, worker=worker)
    if options.log_format is LogFormat.JSON:  # nothing but objects
        console = _Console(stderr=True, force_terminal=False)
    return console


async def _health(
    stack: AsyncExitStack, options: Options, ready: Callable[[], bool], facts: Callable[[], dict[str, Any]]
) -> None:
    if options.health_port is not None:
        try:
            port = await stack.enter_async_context(health.served(options.health_port, ready, facts))
        except OSError as e:
            raise Refused(f"--health-port {options.health_port}: {e.strerror or e}") from e
        log.info("health at http://%s:%d/live and /ready", health.LOOPBACK, port, extra={"port": port})


def _finish(work: Coroutine[Any, Any, int]) -> None:
    """Run to the end, and then end: neither a thread of the loop's nor any other keeps the process."""
    code, closing = 1, None
    try:
        with asyncio.Runner() as runner:
            try:
                code = runner.run(work)
            finally:
                closing = _give_up_in(_EXIT_WITHIN, code)
    finally:
        if closing is not None:
            closing.cancel()
        if any(not thread.daemon for thread in threading.enumerate() if thread is not threading.main_thread()):
            threading.Thread(target=_give_up_after_the_main_thread, args=[code], daemon=True).start()
    if code:
        raise typer.Exit(code)


def _give_up_in(seconds: float, code: int) -> threading.Timer:
    timer = threading.Timer(seconds, _give_up, [code])
    timer.daemon = True
    timer.start()
    return timer


def _give_up_after_the_main_thread(code: int) -> None:
    threading.main_thread().join()
    time.sleep(_EXIT_WITHIN)
    _give_up(code)


def _give_up(code: int) -> None:
    log.error("threads run on; they are left behind")
    os._exit(code)
