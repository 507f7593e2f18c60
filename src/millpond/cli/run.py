"""`millpond run`: run the subscribers of a pond, in one process or in several under a supervisor."""

# No postponed annotations: typer reads them.

from pathlib import Path

import typer

from millpond.cli import health, run_child, run_on_spark
from millpond.cli import run_arguments as given
from millpond.cli.app import app
from millpond.cli.logs import LogFormat
from millpond.cli.reload import run_and_reload
from millpond.cli.run_console import configure_logging, configure_reload_log
from millpond.cli.run_options import RunOptions, check_for_pond, check_place, names, queue_names, seconds, shard_names
from millpond.cli.run_supervisor import process_supervisor, supervise
from millpond.cli.run_to_end import run_to_end
from millpond.cli.run_worker import run_worker
from millpond.cli.user_module import load_pond
from millpond.pond import Millpond
from millpond.seam.workers import DEAD_AFTER, check_dead_after


@app.command("run")
def run(
    context: typer.Context,
    target: given.Target,
    workers: given.Workers = 1,
    queues: given.Queues = None,
    graceful_timeout: given.GracefulTimeout = "15s",
    log_format: given.ChosenLogFormat = LogFormat.TEXT,
    log_level: given.ChosenLogLevel = given.LogLevel.INFO,
    health_port: given.HealthPort = None,
    health_host: given.HealthHost = health.LOOPBACK,
    until_idle: given.UntilIdle = False,
    end_when_stuck: given.EndWhenStuck = False,
    dead_after: given.DeadAfter = f"{DEAD_AFTER:g}s",
    cancel_cut_off: given.CancelCutOff = False,
    reload: given.Reload = False,
    shards: given.Shards = None,
    key_range: given.KeyRangeText = None,
    on: given.On = given.Where.HERE,
    master: given.Master = "local[*]",
    tasks: given.Tasks = None,
    py_files: given.PyFiles = None,
    archives: given.Archives = None,
    conf: given.Conf = None,
    driver_port: given.DriverPort = 0,
    supervised: given.HiddenText = None,
    child_of: given.HiddenNumber = None,
    child: given.HiddenNumber = None,
) -> None:
    """Run the subscribers of a pond until SIGTERM or SIGINT.

    The first signal lets running handlers finish, a second one interrupts them. Exit codes: 0 stopped by a signal
    or idle; 1 the database, a hook or a worker failed; 2 the command was wrong.
    """
    options = RunOptions(
        target=target,
        grace=seconds(graceful_timeout, "--graceful-timeout"),
        queues=queue_names(queues),
        log_format=log_format,
        log_level=log_level,
        health_port=health_port,
        health_host=health_host,
        until_idle=until_idle,
        end_when_stuck=end_when_stuck,
        dead_after=check_dead_after(seconds(dead_after, "--dead-after")),
        cancel_cut_off=cancel_cut_off,
        shards=shard_names(shards, key_range),
    )
    if reload:
        configure_reload_log(options)
        arguments = [argument for argument in context.obj if argument != "--reload"]
        raise typer.Exit(run_and_reload(arguments, Path.cwd(), options.grace))
    cluster = run_on_spark.Cluster(master, tasks, names(py_files), names(archives), conf or [], driver_port)
    check_place(on, workers, cluster)
    run_on_spark.find_modules_in(cluster.py_files)
    if child is not None:
        _run_child(options, child, child_of)
        return
    pond = load_pond(target)
    if options.shards is not None:
        pond.claim_from(options.shards)
    check_for_pond(options, workers, pond)
    if on is given.Where.SPARK:
        _run_on_spark(pond, options, cluster)
    elif workers == 1 or supervised is not None:
        run_to_end(run_worker(pond, options, supervised))
    else:
        console = configure_logging(pond, options, None)
        supervisor = process_supervisor(options, workers, console)
        run_to_end(supervise(supervisor, f"{workers} workers", options, console))


def _run_child(options: RunOptions, number: int, child_of: int | None) -> None:
    worker = run_child.bind_to_worker(number)
    pond = load_pond(options.target)
    configure_logging(pond, options, child_of)
    run_to_end(run_child.run(pond, worker))


def _run_on_spark(pond: Millpond, options: RunOptions, cluster: run_on_spark.Cluster) -> None:
    console = configure_logging(pond, options, None)
    with run_on_spark.session(pond, options.target, cluster) as spark:
        supervisor = run_on_spark.supervisor(pond, spark, cluster, options)
        what = f"{supervisor.size} tasks of {spark.sparkContext.master}"
        run_to_end(supervise(supervisor, what, options, console))
