"""Exports, compactions and purges that are killed where it hurts: `python -m tests.lake.dying URL LAKE`.

Each try is a child that dies by SIGKILL at one point, so that nothing of it is cleaned up; then the next begins. Last
of all comes one that is left alone. Prints which points killed, every id that was ever archived, and those that the
archive still has.
"""

from __future__ import annotations

import asyncio
import importlib
import inspect
import json
import os
import signal
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import millpond
from millpond import Ack, Message
from millpond.spark.lake import compact, export, manifest, parquet
from millpond.transports.database import archive
from millpond.transports.database.mysql import MysqlDialect
from millpond.transports.database.postgres import PostgresDialect
from millpond.transports.database.store import DatabaseStore
from millpond.transports.url import Url
from tests.lake.here import Here, exporter

# Modules, although functions of the same names hide them.
COMPACT, EXPORT = (sys.modules[f"millpond.spark.lake.{name}"] for name in ("compact", "export"))
assert callable(compact) and callable(export)

POINTS: dict[str, tuple[Any, str, int]] = {
    "opened": (manifest.Lake, "open", 1),
    "entered in the database": (DatabaseStore, "open_export", 1),
    "closed": (DatabaseStore, "close_archive", 1),
    "planned": (EXPORT.Exporter, "_plan", 1),
    "in a task, a file begun": (parquet.Writers, "_begin", 1),
    "in a task, a file ended": (parquet.Writers, "_end", 1),
    "written": (EXPORT, "written_by_tasks", 1),
    "entry written beside": (manifest, "_write_beside", 3),
    "committed": (manifest.Lake, "commit", 1),
    "noted": (DatabaseStore, "note_export", 1),
    "files merged": (COMPACT, "written_by_tasks", 1),
    "merged files committed": (manifest.Lake, "commit", 2),
    "some purged": (archive, "purge_some", 1),
}


FETCH = "millpond.transports.database.fetch"
FETCHERS = {"sqlite": f"{FETCH}.sqlite", "postgresql": f"{FETCH}.postgres", "mysql": f"{FETCH}.mysql"}


def die_after(owner: Any, name: str, nth: int) -> None:
    """At the end of the nth call; of steps or of a coroutine, when it is over."""
    original: Callable[..., Any] = getattr(owner, name)
    calls = 0

    def dying(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        result = original(*args, **kwargs)
        if calls < nth:
            return result
        if inspect.iscoroutine(result):
            return _after(result)
        if hasattr(result, "send"):
            return _after_steps(result)
        return _die()

    setattr(owner, name, dying)


async def _after(work: Any) -> None:
    await work
    _die()


def _after_steps(steps: Any) -> Any:
    yield from steps
    _die()


def _die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def everything(url: str, path: Path) -> None:
    one = exporter(path, url)
    one.export()
    COMPACT.compact_opened(Here(), one.opened(), keep=0)
    one.purge(older_than=0)
    one.close()


def killed(work: Callable[[], None], point: tuple[Any, str, int]) -> bool:
    child = os.fork()
    if child == 0:
        try:
            die_after(*point)
            work()
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status) or os.WEXITSTATUS(status) == 0
    return os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL


async def settle(url: str, count: int) -> list[str]:
    store: Any = await millpond.connect(url, migrate=True)
    await store.publish([Message(queue=f"q{n % 2}", payload=b"x") for n in range(count)])
    claims = await store.claim(["q0", "q1"], limit=count, lease=60)
    assert not await store.settle([Ack(claim.receipt) for claim in claims])
    await store.close()
    return [str(claim.message.id) for claim in claims]


async def left(url: str) -> list[str]:
    store: Any = await millpond.connect(url)
    rows = await store.archived(limit=1000)
    await store.close()
    return [str(row.id) for row in rows]


def main(url: str, path: Path) -> None:
    MysqlDialect.grace = PostgresDialect.grace = 0.0
    for module in ("pyarrow.parquet", "pyspark", FETCHERS[Url(url).scheme]):
        importlib.import_module(module)  # once, and not in each child again
    archived: list[str] = []
    died = []
    for name, point in POINTS.items():
        archived += asyncio.run(settle(url, 6))
        if killed(lambda: everything(url, path), point):
            died.append(name)
    before = asyncio.run(left(url))
    everything(url, path)
    print(json.dumps({"died": died, "archived": archived, "before": before, "left": asyncio.run(left(url))}))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
