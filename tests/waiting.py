"""Waiting for what no event of this process tells: another process, a database, a file."""

from __future__ import annotations

import asyncio
import os
import subprocess
from collections.abc import Awaitable, Callable
from typing import Any

SOON = 120.0
"""Nothing that a short test waits for takes longer, however busy the machine."""


async def until(
    condition: Callable[[], Any | Awaitable[Any]], what: str = "it", within: float = SOON, every: float = 0.01
) -> Any:
    """The first true answer of a condition, or a failure that names it."""
    try:
        async with asyncio.timeout(within):
            while True:
                answer = condition()
                if isinstance(answer, Awaitable):
                    answer = await answer
                if answer:
                    return answer
                await asyncio.sleep(every)
    except TimeoutError:
        raise AssertionError(f"waited {within:g} s for {what}") from None


async def ended(process: subprocess.Popen[bytes]) -> int:
    """The exit code of a process."""
    await until(lambda: process.poll() is not None, f"the end of process {process.pid}")
    return process.returncode


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True
