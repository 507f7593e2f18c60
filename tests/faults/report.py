"""The result of a scenario on a database: one line for people and one record for programs."""

from __future__ import annotations

import json
import os
import platform
import re
import sys
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

FOLDER = "MILLPOND_FAULTS_JSON"
SEED = int(os.environ["MILLPOND_FAULTS_SEED"])
LINES: list[str] = []
"""Lines of all tests, printed at the end of the run."""

_NOT_TESTED = "a real power cut, a disk that lies about fsync, the loss of an asynchronous replica"


@dataclass
class Line:
    """Result of one scenario."""

    scenario: str
    database: str
    messages: int
    faults: int
    lost: int = 0
    doubled: int = 0
    unflagged: int = 0
    recovered: int = 0
    innocents: int = 0
    """Messages that are FAILED because of a fault that was not theirs."""
    rate: float | None = None
    """Throughput of the messages without a fault during it, or after it if nothing can be written meanwhile, as a
    fraction of that without it; None: not measured."""
    more: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        more = "".join(f" {name}={value}" for name, value in self.more.items())
        return (
            f"{self.scenario:<34} {self.database:<9} messages={self.messages} faults={self.faults} lost={self.lost} "
            f"doubled={self.doubled} unflagged={self.unflagged} recovered={self.recovered} innocents={self.innocents} "
            f"rate={'-' if self.rate is None else f'{self.rate:.2f}'}{more}"
        )


def report(line: Line, server: dict[str, str]) -> None:
    """Print the line; append the record to the file that the environment names."""
    print(line)
    LINES.append(str(line))
    folder = os.environ.get(FOLDER)
    if folder:
        Path(folder).mkdir(parents=True, exist_ok=True)
        name = re.sub(r"\W+", "-", f"{line.scenario}-{line.database}")
        (Path(folder) / f"{name}.json").write_text(json.dumps(record(line, server), indent=2) + "\n")


def record(line: Line, server: dict[str, str]) -> dict[str, Any]:
    names = ("millpond", "asyncpg", "asyncmy", "psycopg", "PyMySQL")
    return {
        **{name: value for name, value in vars(line).items() if name != "more"},
        **line.more,
        "seed": SEED,
        "versions": {"python": sys.version.split()[0], **{name: version(name) for name in names}},
        "server": server,
        "machine": {"cpus": os.cpu_count(), "system": platform.platform()},
        "not tested": _NOT_TESTED,
    }
