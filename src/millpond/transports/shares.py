"""Fair shares of a limit: the order in which a claim asks several queues, and how much it takes from each."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Generic, TypeVar

Q = TypeVar("Q")


class Shares(Generic[Q]):
    """Queues with their shares of a limit, to be iterated. The caller adds the number of messages it got to `taken`.

    `turn` selects the queue that goes first. A queue that had its full share is asked again while other queues have
    left a part of their shares.

    >>> shares = Shares(["empty", "full"], limit=10, turn=0)
    >>> for queue, share in shares:
    ...     print(queue, share)
    ...     shares.taken += share if queue == "full" else 0
    empty 5
    full 10
    """

    def __init__(self, queues: Sequence[Q], limit: int, turn: int) -> None:
        first = turn % len(queues)
        self._queues = [*queues[first:], *queues[:first]]
        self._limit = limit
        self.taken = 0

    def __iter__(self) -> Iterator[tuple[Q, int]]:
        queues = self._queues
        while queues and self.taken < self._limit:
            full = []
            for n, queue in enumerate(queues):
                share = -(-(self._limit - self.taken) // (len(queues) - n))
                if share <= 0:
                    return
                before = self.taken
                yield queue, share
                if self.taken - before == share:
                    full.append(queue)
            queues = full
