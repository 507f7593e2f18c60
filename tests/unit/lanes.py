"""Drive the steps of lanes by hand: each query gets the answer that a test gives."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from millpond.transports.database.messages import marked_lanes, passed_ranges, reread_lanes
from millpond.transports.database.messages.lanes import Takes, Took

DIALECT: Any = SimpleNamespace(probe=lambda params, gaps, floors: ("probe", list(zip(gaps, floors, strict=True))))


class Watch:
    """A stopwatch that a test moves."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def watch(monkeypatch: pytest.MonkeyPatch) -> Watch:
    watch = Watch()
    for module in (reread_lanes, marked_lanes, passed_ranges):
        monkeypatch.setattr(module, "monotonic", watch)
    return watch


def run(steps: Any, answers: Sequence[Any], watch: Watch | None = None, took: float = 0.0) -> tuple[Any, list[Any]]:
    """The result of steps whose queries get these answers, after `took` seconds each; and the queries."""
    queries: list[Any] = []
    left = list(answers)
    try:
        query = next(steps)
        while True:
            queries.append(query)
            if watch is not None:
                watch.now += took
            query = steps.send(left.pop(0))
    except StopIteration as stop:
        assert not left, f"{len(left)} answers were not asked for"
        return stop.value, queries


def takes(*results: Took, ids: set[Any] | None = None) -> tuple[Takes, list[Any]]:
    """Takes with these results, one after the other, and the calls that were made."""
    left = list(results)
    calls: list[Any] = []

    def lane(lane: int, wanted: int, floor: Any) -> Any:
        calls.append((lane, wanted, floor))
        yield from ()
        return left.pop(0)

    def by_ids(wanted_ids: Sequence[Any], wanted: int) -> Any:
        calls.append((list(wanted_ids), wanted))
        yield from ()
        return ids

    return Takes(lane, None if ids is None else by_ids), calls
