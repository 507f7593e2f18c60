"""The plan that a test passes to a Spark job, and the points at which the job dies."""

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
    """The folder of the checkpoint and the files, which outlive the driver."""
    sink: str = "files"
    """files: one folder per batch, overwritten when the batch is repeated; queue: our own sink."""
    per_trigger: int
    master: str = "local[2]"
    settings: dict[str, str] = {}
    forever: bool = False
    """Whether it waits for more messages when the queue is empty."""

    def environment(self) -> dict[str, str]:
        # Python processes of the JVM do not import from the driver's folder.
        return super().environment() | {"PYTHONPATH": str(Path(__file__).resolve().parents[2])}

    def reach(self, point: str, when: str, seq: int) -> None:
        """Die here if this is the point and the claim has that number or a later one."""
        aim = self.aim
        if aim is not None and (aim.point, aim.when) == (point, when) and seq >= aim.nth:
            History(Path(self.folder) / "history").write(died=point, when=when, seq=seq)
            die_with_driver()


def die_with_driver() -> NoReturn:
    """Kill all processes of the query at once: the driver, its JVM, planners and task runners."""
    pids = family(int(os.environ[DRIVER]))
    for pid in sorted(pids, key=os.getpid().__eq__):  # this one last
        try:
            os.kill(pid, 9)
        except ProcessLookupError:
            continue
    die()
