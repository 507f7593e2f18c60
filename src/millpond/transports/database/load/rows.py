"""Into databases whose drivers take rows: many in one statement, through a store of our own."""

from __future__ import annotations

import asyncio
from typing import Any

import pyarrow as pa

from millpond.transports import connect
from millpond.transports.database.staging import Batch
from millpond.transports.url import Url


class RowLoader:
    def __init__(self, url: Url, **options: Any) -> None:
        self._runner = asyncio.Runner()
        try:
            self._store: Any = self._runner.run(connect(url.raw, **options))
        except BaseException:
            self._runner.close()
            raise

    def load(self, batch: Batch, rows: pa.Table) -> int:
        values = list(zip(*(column.to_pylist() for column in rows.columns), strict=True))
        lot: int = self._runner.run(self._store.load(batch, values))
        return lot

    def close(self) -> None:
        self._runner.run(self._store.close())
        self._runner.close()

    def __enter__(self) -> RowLoader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def open_loader(url: Url, **options: Any) -> RowLoader:
    return RowLoader(url, **options)
