"""Options of `millpond run`: parsed and checked."""

from __future__ import annotations

import msgspec

from millpond import transports
from millpond.cli import health, parse
from millpond.cli.logs import LogFormat
from millpond.cli.run_arguments import LogLevel, Where
from millpond.cli.run_on_spark import Cluster
from millpond.errors import InvalidOption, Unsupported
from millpond.pond import Millpond
from millpond.seam.workers import DEAD_AFTER
from millpond.transports.key_range import KeyRange


class RunOptions(msgspec.Struct, frozen=True):
    """Options of a single worker and of the supervisor."""

    target: str
    queues: list[str] | None
    grace: float
    log_format: LogFormat
    log_level: LogLevel
    health_port: int | None
    until_idle: bool
    end_when_stuck: bool = False
    health_host: str = health.LOOPBACK
    dead_after: float = DEAD_AFTER
    cancel_cut_off: bool = False
    shards: list[str] | None = None

    @property
    def worker_options(self) -> list[str]:
        """Options that each worker of a supervisor gets as they are."""
        stuck = ["--end-when-stuck"] if self.end_when_stuck else []
        cut_off = ["--cancel-cut-off"] if self.cancel_cut_off else []
        logs_ = ["--log-format", self.log_format, "--log-level", self.log_level]
        shards = [] if self.shards is None else ["--shards", ",".join(self.shards)]
        return [*logs_, *shards, *stuck, "--dead-after", f"{self.dead_after}s", *cut_off]


def seconds(text: str, option: str) -> float:
    found = parse.duration(text, option)
    assert found is not None
    return found.total_seconds()


def queue_names(text: str | None) -> list[str] | None:
    """The queues of `--queues`; None: all."""
    found = None if text is None else names(text)
    if found == []:
        raise InvalidOption("--queues names no queue")
    return found


def shard_names(shards: str | None, key_range: str | None) -> list[str] | None:
    """The shards of `--shards`, or a key range that stands for them; None: all."""
    if shards is not None and key_range is not None:
        raise InvalidOption("give either --shards or --key-range, not both")
    if key_range is not None:
        return [str(KeyRange.parse(key_range))]
    if shards is not None and not names(shards):
        raise InvalidOption("--shards names no shard")
    return None if shards is None else names(shards)


def names(text: str | None) -> list[str]:
    return [name.strip() for name in (text or "").split(",") if name.strip()]


def check_place(on: Where, workers: int, cluster: Cluster) -> None:
    """Raise for options of another place than the chosen one."""
    if on is Where.SPARK:
        if workers != 1:
            raise InvalidOption("--workers is for this machine; with --on spark use --tasks")
    elif cluster != Cluster():
        raise InvalidOption("--master, --tasks, --py-files, --archives, --conf and --driver-port are for --on spark")


def check_for_pond(options: RunOptions, workers: int, pond: Millpond) -> None:
    """Raise if the pond cannot be run with these options."""
    if not pond.of_queues(options.queues):  # raises if a name is unknown
        raise InvalidOption(f"nothing to run: {options.target} has no subscriber")
    port = options.health_port
    if port is not None and not 0 <= port <= 65535:
        raise InvalidOption(f"--health-port must be from 0 to 65535, not {port}")
    if port is None and options.health_host != health.LOOPBACK:
        raise InvalidOption("--health-host needs --health-port")
    if workers > 1 and not transports.is_shared(pond.url.raw):
        raise Unsupported(
            f"with {pond.url.scheme}:// each of {workers} processes would have its own messages (it lacks the "
            "capability SHARED): leave --workers out, or give the pond the URL of a database"
        )
