"""A clock that tests can set while processes use it."""

from __future__ import annotations

from pathlib import Path

from millpond.clock import SECOND, SystemClock


class FileClock:
    """The system's clock with an offset in hours that a file holds. It stands for the database's clock."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def now(self) -> int:
        return SystemClock().now() + round(float(self._path.read_text()) * 3600 * SECOND)

    def step(self, hours: float) -> None:
        """Set the offset, at once for all processes."""
        new = self._path.with_suffix(".new")
        new.write_text(f"{hours}")
        new.replace(self._path)
