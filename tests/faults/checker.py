"""The checker: from what was published and what handlers did, what went wrong. Sets, and nothing else."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Set
from dataclasses import dataclass, field

from tests.faults.effects import INSIDE, OUTSIDE, Run


@dataclass
class Tally:
    """What became of the messages of one scenario."""

    messages: int
    lost: set[str] = field(default_factory=set)
    """Published, and after the drain neither effective nor among the dead letters."""
    unexpected: set[str] = field(default_factory=set)
    """Delivered, and never published."""
    doubled: int = 0
    """Deliveries beyond the first of a message."""
    unflagged: set[str] = field(default_factory=set)
    """Delivered again without being told so, or twice under one number of deliveries."""
    wrong: set[str] = field(default_factory=set)
    """The effect inside the ack's transaction did not happen exactly once."""
    recovered: int = 0
    """Publish failed without an answer, and the message was delivered nevertheless."""
    dead: set[str] = field(default_factory=set)

    @property
    def faultless(self) -> bool:
        return not (self.lost or self.unexpected or self.unflagged or self.wrong)


def check(
    confirmed: Set[str], unknown: Set[str], runs: Iterable[Run], *, exact: Set[str] = frozenset(), dead: Set[str]
) -> Tally:
    """`exact`: the messages whose handler acks within its own transaction. `dead`: those in dead letters."""
    outside: defaultdict[str, list[Run]] = defaultdict(list)
    inside: Counter[str] = Counter()
    for run in runs:
        if run.place == OUTSIDE:
            outside[run.number].append(run)
        elif run.place == INSIDE:
            inside[run.number] += 1
    delivered = set(outside)
    tally = Tally(len(confirmed) + len(unknown & delivered))
    tally.lost = set(confirmed) - delivered - dead
    tally.unexpected = delivered - confirmed - unknown
    tally.recovered = len(unknown & delivered)
    tally.dead = set(dead)
    for number, its in outside.items():
        tally.doubled += len(its) - 1
        unflagged = sum(not run.redelivered for run in its) > 1
        if unflagged or len({run.deliveries for run in its}) < len(its):
            tally.unflagged.add(number)
        if number in exact and inside[number] != (number not in dead):
            tally.wrong.add(number)
    tally.wrong |= set(inside) - set(exact)
    return tally
