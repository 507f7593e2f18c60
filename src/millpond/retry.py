"""When a failed message is tried again: a pure policy."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from typing import Any, Literal

import msgspec

from millpond.clock import SECOND, Seconds, micros
from millpond.errors import InvalidOption


class Retry(msgspec.Struct, frozen=True, kw_only=True):
    """Backoff with jitter. `attempts` counts handler runs, the first included.

    After the n-th failed run the wait is `min(maximum, initial * multiplier ** (n - 1) + step * (n - 1))`,
    drawn from a band of +- `jitter` around that and never above `maximum`. At the cap the band lies below
    it: messages that failed together must not come back together. `first="immediate"` makes the first
    redelivery wait-free and starts the backoff with the second.

    For a rule of your own override `decide` in a subclass (`class Patient(Retry, frozen=True)`).

    >>> Retry(initial=1, multiplier=2, maximum=60, jitter=0).delay(3)
    4.0
    """

    initial: Seconds = 1.0
    multiplier: float = 2.0
    step: Seconds = 0.0
    maximum: Seconds = 300.0
    jitter: float = 0.33
    attempts: int | None = 8
    total: Seconds | None = None
    """Seconds after the start of the first attempt in which others may start."""
    first: Literal["immediate", "backoff"] = "backoff"
    never: tuple[type[BaseException], ...] = ()
    """Exceptions that no retry can fix: the message is FAILED at once."""

    def __post_init__(self) -> None:
        for name in ("initial", "step", "maximum"):
            micros(getattr(self, name), f"Retry.{name}")
        if self.total is not None:
            micros(self.total, "Retry.total")
        if not (isinstance(self.multiplier, int | float) and 1 <= self.multiplier < math.inf):
            raise InvalidOption(f"Retry.multiplier must be 1 or more, not {self.multiplier!r}")
        if not (isinstance(self.jitter, int | float) and 0 <= self.jitter <= 1):
            raise InvalidOption(f"Retry.jitter must be between 0 and 1, not {self.jitter!r}")
        if self.attempts is not None and (
            isinstance(self.attempts, bool) or not isinstance(self.attempts, int) or self.attempts < 1
        ):
            raise InvalidOption(f"Retry.attempts must be 1 or more, or None for no limit, not {self.attempts!r}")
        if self.first not in ("immediate", "backoff"):
            raise InvalidOption(f'Retry.first must be "immediate" or "backoff", not {self.first!r}')
        never: Any = self.never
        if not isinstance(never, tuple) or not all(isinstance(e, type) and issubclass(e, BaseException) for e in never):
            raise InvalidOption(f"Retry.never must be a tuple of exception classes, not {never!r}")

    @classmethod
    def none(cls) -> Retry:
        """One run. An error is final."""
        return cls(attempts=1)

    @classmethod
    def constant(cls, delay: Seconds, *, attempts: int | None = 8, jitter: float = 0.0) -> Retry:
        return cls(initial=delay, multiplier=1.0, maximum=delay, attempts=attempts, jitter=jitter)

    @classmethod
    def linear(
        cls,
        initial: Seconds,
        step: Seconds,
        *,
        maximum: Seconds = 300.0,
        attempts: int | None = 8,
        jitter: float = 0.0,
    ) -> Retry:
        return cls(initial=initial, step=step, multiplier=1.0, maximum=maximum, attempts=attempts, jitter=jitter)

    def delay(self, attempt: int, draw: Callable[[], float] = random.random) -> float:
        """Seconds to wait after the attempt with this number (1, 2, …). `draw` returns 0 to 1."""
        if self.first == "immediate":
            if attempt <= 1:
                return 0.0
            attempt -= 1
        initial, step, maximum = (_seconds(v) for v in (self.initial, self.step, self.maximum))
        if initial <= 0 or self.multiplier == 1:
            wait = initial
        else:
            # Beyond this exponent the cap applies anyway, and a float would overflow.
            enough = math.log(max(maximum / initial, 1.0)) / math.log(self.multiplier) + 1
            wait = initial * self.multiplier ** min(attempt - 1, enough)
        wait = min(maximum, wait + step * (attempt - 1))
        low, high = wait * (1 - self.jitter), min(wait * (1 + self.jitter), maximum)
        return low + (high - low) * draw()

    def decide(
        self,
        attempts: int,
        error: BaseException | None = None,
        elapsed: float = 0.0,
        draw: Callable[[], float] = random.random,
    ) -> float | None:
        """Seconds until the next attempt, or None when this was the last.

        `attempts` includes the one that just failed; `elapsed` are seconds since the first one began. A subclass may
        override it; `draw` returns a random number from 0 to 1. If it raises, or returns anything else, the error is
        logged and the defaults of `Retry` decide.
        """
        if error is not None and self.never and isinstance(error, self.never):
            return None
        if self.attempts is not None and attempts >= self.attempts:
            return None
        wait = self.delay(attempts, draw)
        if self.total is not None and elapsed + wait > _seconds(self.total):
            return None
        return wait


def _seconds(value: Seconds) -> float:
    return micros(value, "Retry") / SECOND
