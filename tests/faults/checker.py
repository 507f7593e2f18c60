"""The checker: compares published messages with the effects of handlers, by sets only."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Set
from dataclasses import dataclass, field

from tests.faults.effects import INSIDE, OUTSIDE, Run


@dataclass
class Tally:
    """Results of the messages of one scenario."""

    messages: int
    lost: set[str] = field(default_factory=set)
    """Published, but after the drain without effect and not a dead letter."""
    unexpected: set[str] = field(default_factory=set)
    """Delivered, but never published."""
    doubled: int = 0
    """Deliveries beyond the first of a message."""
    unflagged: set[str] = field(default_factory=set)
    """Delivered again without the redelivered flag, or twice with the same delivery count."""
    wrong: set[str] = field(default_factory=set)
    """The effect inside the ack's transaction did not happen exactly once."""
    recovered: int = 0
    """Publish failed without an answer, but the message was delivered."""
    dead: set[str] = field(default_factory=set)
    innocents: set[str] = field(default_factory=set)
    """Dead letters that are no poison."""

    @property
    def faultless(self) -> bool:
        return not (self.lost or self.unexpected or self.unflagged or self.wrong or self.innocents)


def check(
    confirmed: Set[str],
    unknown: Set[str],
    runs: Iterable[Run],
    *,
    exact: Set[str] = frozenset(),
    dead: Set[str],
    poison: Set[str] = frozenset(),
) -> Tally:
    """`exact`: handlers that ack within their own transaction. `dead`: dead letters; `poison`: those expected."""
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
    tally.innocents = set(dead) - poison
    for number, its in outside.items():
        tally.doubled += len(its) - 1
        unflagged = sum(not run.redelivered for run in its) > 1
        if unflagged or len({run.deliveries for run in its}) < len(its):
            tally.unflagged.add(number)
        if number in exact and inside[number] != (number not in dead):
            tally.wrong.add(number)
    tally.wrong |= set(inside) - set(exact)
    return tally
