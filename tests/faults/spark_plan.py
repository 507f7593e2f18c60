"""What a test tells a Spark job that it starts, and the job's points at which it dies."""

from __future__ import annotations

import os
from pathlib import Path
from typing import NoReturn

from servers.processes import family
from tests.faults.aim import die
from tests.faults.history import History
from tests.faults.plan import Plan

QUEUE, STREAM, TARGET = "orders", "faults", "target"
DRIVER = "MILLPOND_FAULTS_DRIVER"
"""The process id of the driver, for the processes that its JVM starts."""


class Job(Plan, frozen=True, kw_only=True):
    """A query from the queue to files or to another queue. The `nth` of its aim is the number of a claim."""

    place: str
    """Where the checkpoint and the files are: what outlives the driver."""
    sink: str = "files"
    """files: one folder for each batch, written over when the batch is repeated; queue: our own sink."""
    per_trigger: int
    master: str = "local[2]"
    settings: dict[str, str] = {}
    forever: bool = False
    """Whether it waits for more when all is done."""

    def environment(self) -> dict[str, str]:
        # Python in the JVM's processes does not look where the driver was started.
        return super().environment() | {"PYTHONPATH": str(Path(__file__).resolve().parents[2])}

    def reach(self, point: str, when: str, seq: int) -> None:
        """Die here, if this is the point and the claim has that number or a later one."""
        aim = self.aim
        if aim is not None and (aim.point, aim.when) == (point, when) and seq >= aim.nth:
            History(Path(self.folder) / "history").write(died=point, when=when, seq=seq)
            die_with_driver()


def die_with_driver() -> NoReturn:
    """All processes of the query at once: the driver, its JVM, those that plan, those that run tasks."""
    pids = family(int(os.environ[DRIVER]))
    for pid in sorted(pids, key=os.getpid().__eq__):  # this one last
        try:
            os.kill(pid, 9)
        except ProcessLookupError:
            continue
    die()
