"""Bounds on rates and on the number of calls at one time."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager

from millpond.clock import monotonic

_MOST_CALLERS = 10_000
"""Callers whose rate is remembered; those that were longest silent are forgotten."""


class TooMany(Exception):
    """A bound is reached. `after`: seconds until it is worth to try again."""

    def __init__(self, text: str, after: float = 1.0, *, status: int = 429) -> None:
        super().__init__(text)
        self.after = after
        self.status = status


class Rates:
    """A bucket of calls for each caller: `rate` a second, and as many at once."""

    def __init__(self, rate: float) -> None:
        self._rate = rate
        self._buckets: OrderedDict[str, tuple[float, float]] = OrderedDict()

    def take(self, caller: str) -> None:
        """Count one call. Raises `TooMany` when the bucket is empty."""
        most = max(1.0, self._rate)
        now = monotonic()
        left, at = self._buckets.pop(caller, (most, now))
        left = min(most, left + (now - at) * self._rate)
        if left < 1:
            self._buckets[caller] = (left, now)
            raise TooMany("too many requests; slow down", (1 - left) / self._rate)
        self._buckets[caller] = (left - 1, now)
        if len(self._buckets) > _MOST_CALLERS:
            self._buckets.popitem(last=False)

    def forget(self) -> None:
        """Begin anew with every caller."""
        self._buckets.clear()


_SHARE = 0.75
"""Share of all places that one caller may have, so that another one finds some."""


class Places:
    """A number of places. No caller waits for one."""

    def __init__(self, most: int, what: str) -> None:
        self._most = most
        self._what = what
        self.taken = 0
        self._by_caller: Counter[str] = Counter()

    @contextmanager
    def one(self) -> Iterator[None]:
        if self.taken >= self._most:
            raise TooMany(f"the server has {self._most} {self._what} already; try again later", status=503)
        self.taken += 1
        try:
            yield
        finally:
            self.taken -= 1

    def is_full(self, caller: str) -> bool:
        """Whether this caller finds no place."""
        return self.taken >= self._most or self._by_caller[caller] >= self._most_of_one

    @property
    def _most_of_one(self) -> int:
        return max(1, int(self._most * _SHARE))

    @contextmanager
    def share(self, caller: str) -> Iterator[None]:
        """Count a place of this caller, who may not have all of them."""
        if self._by_caller[caller] >= self._most_of_one:
            raise TooMany(f"{caller} has {self._most_of_one} {self._what} already; end some first")
        self._by_caller[caller] += 1
        try:
            yield
        finally:
            self._by_caller[caller] -= 1
            if not self._by_caller[caller]:
                del self._by_caller[caller]
