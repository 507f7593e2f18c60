"""Write items together, and by halves after an error, until those that fail are alone."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Hashable, Sequence
from typing import Generic, TypeVar

from millpond.clock import monotonic
from millpond.errors import Closed, StoreBusy, StoreUnavailable

Item = TypeVar("Item", bound=Hashable)
T = TypeVar("T")

NOT_THE_ROWS = (StoreBusy, StoreUnavailable, Closed)
"""Errors that do not concern the rows of a statement: it may be run again, or no statement can be."""
_MOST_FAILURES, _MOST_SECONDS = 50, 5.0
"""Maximum number of writes that fail, and the time after which no further one begins. If everything fails, it ends."""


class Halved(Generic[Item, T]):
    """Result of `by_halves`."""

    def __init__(self) -> None:
        self.done: list[tuple[Sequence[Item], T]] = []
        """Parts that were written, with the result of each."""
        self.alone: dict[Item, Exception] = {}
        """Items whose write failed alone."""
        self.left: list[Item] = []
        """Items that failed together with others, or were not tried."""
        self.error: Exception | None = None
        """The last error; None: all were written."""


async def by_halves(
    write: Callable[[Sequence[Item]], Awaitable[T]],
    parts: Sequence[Sequence[Item]],
    *,
    enough: Callable[[T], bool] = lambda result: False,
) -> Halved[Item, T]:
    """Write each part, and halves of one that fails. `enough`: nothing more is to be written after this result."""
    halved: Halved[Item, T] = Halved()
    waiting = [part for part in reversed(parts) if part]
    failures, until = 0, monotonic() + _MOST_SECONDS
    while waiting and failures < _MOST_FAILURES and (not failures or monotonic() < until):
        part = waiting.pop()
        try:
            result = await write(part)
        except Exception as e:
            halved.error = e
            failures += 1
            if isinstance(e, NOT_THE_ROWS):
                waiting.append(part)
                break
            half = len(part) // 2
            if half:
                waiting += [part[half:], part[:half]]
            else:
                halved.alone[part[0]] = e
        else:
            halved.done.append((part, result))
            if enough(result):
                break
    halved.left = [item for part in reversed(waiting) for item in part]
    return halved
