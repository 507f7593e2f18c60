"""The settings of a queue, which are stored with it. A subscriber's own options replace them."""

from __future__ import annotations

import msgspec

from millpond.clock import SECOND, Seconds
from millpond.retry import Retry


class QueueSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of one queue. None: the default, which the reference names."""

    queue: str
    paused: bool = False
    lease_us: int | None = None
    retry: Retry | None = None
    max_crashes: int | None = None
    """Crashes after which a message is FAILED; 0: no limit."""
    max_deliveries: int | None = None
    """Deliveries of any kind after which a message is FAILED without running; 0: no limit."""
    keep_completed_us: int | None = None
    keep_failed_us: int | None = None
    """Retention of the archive; None keeps messages permanently."""

    @property
    def lease(self) -> Seconds | None:
        """In seconds."""
        return None if self.lease_us is None else self.lease_us / SECOND
