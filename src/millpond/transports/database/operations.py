"""What an operator may ask of a store: browse, count, reschedule, pause, purge, replay."""

from __future__ import annotations

from millpond.transports.database.running import Running


class Operations(Running):
    """The operator's verbs."""
