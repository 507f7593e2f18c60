"""Arrow tables into the staging tables, in each database's fastest way: what Spark's executors write.

    with open_loader(url, schema=None, table_prefix="") as loader:
        lot = loader.load(batch, table)

Where a database has a faster way for what need not appear with the rest of its batch, a task writes its part of it
straight among the messages, in one transaction: `open_part`.

Blocking and for one thread: no event loop is needed, or may be running. The columns are those of
`staging.COLUMNS` without the lot, ids as 16 bytes.
"""

from __future__ import annotations

import importlib
from collections.abc import Collection
from types import ModuleType
from typing import TYPE_CHECKING, Any, Protocol, Self

from millpond.errors import MissingDriver

if TYPE_CHECKING:
    from millpond.transports.database.staging import Batch, Written
    from millpond.transports.url import Url

__all__ = ["Loader", "Part", "has_parts", "open_loader", "open_part"]


class Loader(Protocol):
    """One connection, for writing into the staging tables."""

    def load(self, batch: Batch, rows: Any) -> int:
        """Stage a table of rows in one transaction; returns the number of their lot."""

    def close(self) -> None: ...

    def __enter__(self) -> Self: ...

    def __exit__(self, *_: object) -> None: ...


class Part(Protocol):
    """One transaction that publishes one part of a batch, unless that was done before."""

    def load(self, rows: Any) -> None:
        """Rows with new ids; nobody sees them yet."""

    def commit(self, queues: Collection[str]) -> Written:
        """Publish, and wake whoever waits for these queues."""

    def __enter__(self) -> Self: ...

    def __exit__(self, *_: object) -> None: ...


_MODULES = {"postgresql": "postgres", "postgres": "postgres"}
"""Where a database has a way of its own; the others take rows through the store."""


def open_loader(url: Url, **options: Any) -> Loader:
    """Connect. The URL is that of a database (see `millpond.transports.check`)."""
    loader: Loader = _module(url).open_loader(url, **options)
    return loader


def has_parts(url: Url) -> bool:
    return hasattr(_module(url), "open_part")


def open_part(url: Url, batch: Batch, number: int, **options: Any) -> Part:
    """Connect. Others may write the same part: the first to commit it has published it."""
    part: Part = _module(url).open_part(url, batch, number, **options)
    return part


def _module(url: Url) -> ModuleType:
    try:
        return importlib.import_module(f"{__name__}.{_MODULES.get(url.scheme, 'rows')}")
    except ModuleNotFoundError as e:
        if (e.name or "").startswith("millpond"):
            raise
        raise MissingDriver(
            f"writing to {url.scheme}:// with Spark needs the package {e.name}; install it with: "
            'pip install "millpond[spark,postgres]"'
        ) from e
