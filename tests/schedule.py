"""In which order and in which process the test files of a run go.

Files with long recorded durations start first: a long file that starts last keeps one process busy while the others
have nothing left to do. `--record-durations` refreshes the record; run it on a quiet machine.
"""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

RECORD = Path(__file__).with_name("durations.json")
"""Per file: seconds of its tests (`test`) and of its slow tests (`slow`), and whether it needs Java (`java`)."""
JAVA_PROCESSES = 2
"""Each process with Java tests has a Spark session: 10 seconds to start, a gigabyte, and classes to compile."""

WITHOUT_SHARED_SETUP = "tests/worker/"
"""Tests of a file in this folder have no set-up in common and mostly wait, so they may run in several processes."""

_UNKNOWN = {"test": 5.0, "slow": 5.0}


def record() -> dict[str, dict[str, Any]]:
    return json.loads(RECORD.read_text()) if RECORD.exists() else {}


def file_of(nodeid: str) -> str:
    return nodeid.partition("::")[0]


def unit_of(nodeid: str) -> str:
    """The tests that stay in one process: those of a file, or of one function."""
    return nodeid.partition("[")[0] if nodeid.startswith(WITHOUT_SHARED_SETUP) else file_of(nodeid)


def needs_java(unit: str, known: dict[str, dict[str, Any]]) -> bool:
    """A file without a record needs Java if it tests Spark: a Spark session too many costs more than a wait."""
    file = file_of(unit)
    return bool(known[file].get("java")) if file in known else file.startswith("tests/spark/") or "/test_spark_" in file


def longest_first(items: list[pytest.Item]) -> None:
    """Sort by file; a file's seconds are those of the groups that were selected."""
    known = record()
    groups: dict[str, set[str]] = defaultdict(set)
    for item in items:
        groups[file_of(item.nodeid)].add(group_of(item))
    seconds = {file: sum(known.get(file, _UNKNOWN).get(group, 0) for group in found) for file, found in groups.items()}
    items.sort(key=lambda item: (-seconds[file_of(item.nodeid)], file_of(item.nodeid)))


def group_of(item: pytest.Item) -> str:
    return "slow" if item.get_closest_marker("slow") else "test"


def scheduler(config: pytest.Config, log: Any) -> Any:
    """Keep the tests of a file together, because they share costly set-up; Java in `JAVA_PROCESSES` processes only."""
    from xdist.scheduler import LoadScopeScheduling

    known = record()

    class ByUnit(LoadScopeScheduling):
        java_nodes: set[Any]

        def schedule(self) -> None:
            self.java_nodes = getattr(self, "java_nodes", set())
            super().schedule()

        def _split_scope(self, nodeid: str) -> str:
            return unit_of(nodeid)

        def _assign_work_unit(self, node: Any) -> None:
            self.workqueue.move_to_end(self._next_for(node), last=False)
            super()._assign_work_unit(node)

        def _next_for(self, node: Any) -> str:
            with_java = node in self.java_nodes or len(self.java_nodes) < JAVA_PROCESSES
            for unit in self.workqueue:
                if with_java or not needs_java(unit, known):
                    break
            else:
                unit = next(iter(self.workqueue))  # only Java is left, so a further session pays
            if needs_java(unit, known):
                self.java_nodes.add(node)
            return unit

    return ByUnit(config, log)


class Recorder:
    """Adds up the durations of a run, file by file, and writes them into the record."""

    def __init__(self) -> None:
        self._found: dict[str, dict[str, Any]] = defaultdict(dict)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if isinstance(report, pytest.SubtestReport):
            return  # its seconds are part of its test's
        file = self._found[file_of(report.nodeid)]
        group = "slow" if "slow" in report.keywords else "test"
        file[group] = file.get(group, 0.0) + report.duration
        if "java" in report.keywords:
            file["java"] = True

    def pytest_sessionfinish(self) -> None:
        known = {file: found for file, found in record().items() if Path(file).exists()}
        for file, found in self._found.items():
            seconds = {group: round(found[group], 1) for group in ("test", "slow") if group in found}
            known[file] = {**known.get(file, {}), **seconds, **({"java": True} if "java" in found else {})}
        lines = [f"  {json.dumps(file)}: {json.dumps(known[file])}" for file in sorted(known)]
        RECORD.write_text("{\n" + ",\n".join(lines) + "\n}\n")
