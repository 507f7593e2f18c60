"""The first error of several independent parts of a reap: one part does not keep the others from their work."""

from __future__ import annotations

import logging
from types import TracebackType

from millpond.errors import Closed, StoreUnavailable

log = logging.getLogger("millpond")


class FirstError:
    """A context for each part. `count` ends the reap. Without a connection no other part can succeed either."""

    def __init__(self) -> None:
        self._error: Exception | None = None

    def __enter__(self) -> None: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        if not isinstance(error, Exception) or isinstance(error, Closed | StoreUnavailable):
            return False
        self._error = self._error or error
        return True

    def count(self, total: int) -> int:
        """The number of messages. Without any, the error is raised."""
        if self._error is not None:
            if not total:
                raise self._error
            log.warning("reap incomplete: %s", self._error)
        return total
