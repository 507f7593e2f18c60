"""Waiting for another process, a database or a file, where this process has no event."""

from __future__ import annotations

import asyncio
import os
import re
import subprocess
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

SOON = 240.0
"""Seconds until a short test gives up waiting; enough for a busy machine."""

IS_WAITING = "SELECT 1 FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND datname = current_database()"
"""Finds a row while a session of this database waits for a lock. Other databases of the server do not count, because
other processes of the run use them."""


async def until(
    condition: Callable[[], Any | Awaitable[Any]], what: str = "it", within: float = SOON, every: float = 0.01
) -> Any:
    """The first true result of a condition. A failure names the condition by `what`."""
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


def mariadb_waits(query: Callable[[str], Sequence[Sequence[Any]]]) -> bool:
    """Whether a session of this database waits for a lock.

    The table `innodb_trx` would be simpler. It stays as it is while any session of the server reads it often.
    """
    try:
        ((_, _, status),) = query("SHOW ENGINE INNODB STATUS")
    except UnicodeDecodeError as e:  # it has statements of other tests, with any bytes
        status = e.object.decode(errors="replace")
    waiting = {int(id_) for id_ in re.findall(r"^LOCK WAIT .*\n(?:(?!---).*\n)*?\w+ thread id (\d+)", status, re.M)}
    here = query("SELECT id FROM information_schema.processlist WHERE db = database()")
    return not waiting.isdisjoint(int(id_) for (id_,) in here)


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
