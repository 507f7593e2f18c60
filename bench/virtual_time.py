"""An event loop whose clock stands still while code runs, and jumps to the next timer when none is ready."""

import asyncio
import selectors
import sys
import time
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

T = TypeVar("T")


class VirtualLoop(asyncio.SelectorEventLoop):
    """Time passes only by waiting, and waiting takes no time. There are no sockets and no threads."""

    def __init__(self) -> None:
        self._now = 0.0
        super().__init__(_Jump(self._pass))

    def time(self) -> float:
        return self._now

    def _pass(self, seconds: float) -> None:
        self._now += seconds


class _Jump(selectors.DefaultSelector):
    def __init__(self, jump: Callable[[float], None]) -> None:
        super().__init__()
        self._jump = jump

    def select(self, timeout: float | None = None) -> list[Any]:
        if timeout is None:
            raise RuntimeError("every task waits, and no timer will wake one")
        if timeout > 0:
            self._jump(timeout)
        return []


def run(work: Callable[[], Coroutine[Any, Any, T]]) -> T:
    """Run in virtual time, which begins at 0. Millpond's pauses and timeouts use it too."""
    with asyncio.Runner(loop_factory=VirtualLoop) as runner, _as_monotonic(runner.get_loop().time):
        return runner.run(work())


@contextmanager
def _as_monotonic(clock: Callable[[], float]) -> Iterator[None]:
    """Replace `millpond.clock.monotonic` in all modules that have imported it."""
    users = [
        module
        for name, module in list(sys.modules.items())
        if name.partition(".")[0] == "millpond" and vars(module).get("monotonic") is time.monotonic
    ]
    for module in users:
        vars(module)["monotonic"] = clock
    try:
        yield
    finally:
        for module in users:
            vars(module)["monotonic"] = time.monotonic
