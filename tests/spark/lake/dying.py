"""Exports, compactions and purges that are killed at critical points: `python -m tests.spark.lake.dying URL LAKE`.

Each try is a child process that dies by SIGKILL at one point, without any clean-up. The last try is not killed. Prints
the points that killed, every id that was ever archived, and the ids that the archive still has.
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
from datetime import timedelta
from pathlib import Path
from typing import Any

from deltalake import DeltaTable

import millpond
from millpond import Ack, Message
from millpond.spark.lake import compact, export
from millpond.spark.lake.storage import Folder
from millpond.spark.lake.table import Lake
from millpond.spark.lake.writers import Writers, _Open
from millpond.transports.database.exports.exports import DatabaseExports
from millpond.transports.database.mysql.dialect import MysqlDialect
from millpond.transports.database.operations import operations, purge
from millpond.transports.database.postgres.dialect import PostgresDialect
from millpond.transports.url import Url
from tests.spark.lake.here import Here, exporter

# The modules; functions of the same names hide them.
COMPACT, EXPORT = (sys.modules[f"millpond.spark.lake.{name}"] for name in ("compact", "export"))
assert callable(compact) and callable(export)

POINTS: dict[str, tuple[Any, str, int]] = {
    "created": (Lake, "create", 1),
    "entered in the database": (DatabaseExports, "open", 1),
    "closed": (DatabaseExports, "close_archive", 1),
    "planned": (EXPORT.Exporter, "_plan", 1),
    "in a task, a file begun": (Folder, "begin", 1),
    "in a task, a file ended": (_Open, "end", 1),
    "in a task, all files ended": (Writers, "__exit__", 1),
    "written": (EXPORT, "run_on_executors", 1),
    "fields added": (Lake, "add_fields", 1),
    "committed, not synced": (DeltaTable, "create_write_transaction", 1),
    "committed": (Lake, "export", 1),
    "ranges recorded": (DatabaseExports, "advance", 1),
    "files merged": (COMPACT, "run_on_executors", 1),
    "merged files committed, not synced": (DeltaTable, "create_write_transaction", 2),
    "merged files committed": (Lake, "replace", 1),
    "a file deleted": (Folder, "delete", 1),
    "purged": (operations, "fold_ranges", 1),
    "some purged": (purge, "purge_some", 1),
}


DATABASE = "millpond.transports.database"
FETCHERS = {
    "sqlite": f"{DATABASE}.sqlite.reader",
    "postgresql": f"{DATABASE}.postgres.reader",
    "mysql": f"{DATABASE}.mysql.reader",
}


def die_after(owner: Any, name: str, nth: int) -> None:
    """Die at the end of the nth call; for steps or a coroutine, after they have run."""
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
    one = exporter(path, url, decode="infer")
    one.export()
    COMPACT.compact(Here(), path, keep=timedelta(0))
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


async def settle(url: str, count: int, number: int) -> list[str]:
    """Each round has a separate field in its bodies."""
    store: Any = await millpond.connect(url, migrate=True)
    await store.publish([Message(queue=f"q{n % 2}", payload=b'{"n%d": 1}' % number) for n in range(count)])
    claims = await store.claim(["q0", "q1"], limit=count, lease=60)
    assert not await store.settle([Ack(claim.receipt) for claim in claims])
    await store.close()
    return [str(claim.message.id) for claim in claims]


async def left(url: str) -> list[str]:
    store: Any = await millpond.connect(url)
    rows = await store.operations.archived(limit=1000)
    await store.close()
    return [str(row.id) for row in rows]


def main(url: str, path: Path) -> None:
    MysqlDialect.grace = MysqlDialect.least_grace = PostgresDialect.grace = 0.0
    for module in ("pyarrow.parquet", "pyspark", FETCHERS[Url(url).scheme]):
        importlib.import_module(module)  # once, not in each child
    archived: list[str] = []
    died = []
    for name, point in POINTS.items():
        archived += asyncio.run(settle(url, 6, len(archived)))
        if killed(lambda: everything(url, path), point):
            died.append(name)
    before = asyncio.run(left(url))
    everything(url, path)
    print(json.dumps({"died": died, "archived": archived, "before": before, "left": asyncio.run(left(url))}))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
