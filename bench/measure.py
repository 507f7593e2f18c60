"""Run alternating measurements, and compute medians of the rounds' ratios."""

import gc
import statistics
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

Work = Callable[[], Awaitable[float]]
"""Do some work; return the seconds of the part that counts."""


async def take_turns(works: Mapping[str, Work], turns: int) -> dict[str, list[float]]:
    """Run the works in alternation; returns the seconds of each turn. The first work changes from turn to turn."""
    names = list(works)
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for turn in range(turns):
        first = turn % len(names)
        for name in names[first:] + names[:first]:
            gc.collect()
            seconds[name].append(await works[name]())
    return seconds


@dataclass(frozen=True)
class Measurement:
    """One figure, with its bar if there is one."""

    name: str
    what: str
    against: str
    value: float
    unit: str
    low: float
    high: float
    per_second: Mapping[str, float] = field(default_factory=dict)
    at_least: float | None = None
    at_most: float | None = None
    facts: Mapping[str, Any] = field(default_factory=dict)

    def with_facts(self, more: Mapping[str, Any]) -> "Measurement":
        return replace(self, facts={**self.facts, **more})

    @property
    def met(self) -> bool | None:
        """Whether the bar is reached; None without one."""
        if self.at_least is not None:
            return self.value >= self.at_least
        if self.at_most is not None:
            return self.value <= self.at_most
        return None


def single(
    name: str, what: str, against: str, value: float, unit: str, *, at_most: float | None = None, **facts: Any
) -> Measurement:
    """A figure that is measured once."""
    return Measurement(name, what, against, value, unit, low=value, high=value, at_most=at_most, facts=facts)


def ratio(
    name: str,
    what: str,
    against: str,
    ours: Sequence[float],
    theirs: Sequence[float],
    count: int,
    *,
    at_least: float | None = None,
) -> Measurement:
    """Our speed divided by the other speed, from the seconds of each round of `count` messages."""
    ratios = [b / a for a, b in zip(ours, theirs, strict=True)]
    return Measurement(
        name=name,
        what=what,
        against=against,
        value=statistics.median(ratios),
        unit="ratio",
        low=min(ratios),
        high=max(ratios),
        per_second={"ours": count / statistics.median(ours), "theirs": count / statistics.median(theirs)},
        at_least=at_least,
        facts={"messages": count, "rounds": len(ratios), "ratios": [round(r, 3) for r in ratios]},
    )
