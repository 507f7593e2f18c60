"""A breaker: after a failure calls fail at once, until one of them is let through and succeeds."""

from __future__ import annotations

from millpond.clock import monotonic
from millpond.loop import Backoff


class Breaker:
    """Open after a failure; one call at a time may probe when its pause is over."""

    def __init__(self, first: float = 0.5, longest: float = 5.0) -> None:
        self._backoff = Backoff(first, longest)
        self._until: float | None = None
        """While open: time of the next probe."""
        self._probing = False

    @property
    def is_open(self) -> bool:
        return self._until is not None

    def allows(self) -> bool:
        """Whether a call would be let through now."""
        return self._until is None or (not self._probing and monotonic() >= self._until)

    def begin(self) -> None:
        """Begin a probe: no other call is let through until `end`."""
        self._probing = True

    def succeeded(self) -> None:
        self._until = None
        self._backoff.reset()

    def failed(self) -> None:
        self._until = monotonic() + self._backoff.next()

    def end(self) -> None:
        self._probing = False
