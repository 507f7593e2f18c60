"""Writes Arrow tables through a store, for databases whose drivers take rows."""

from __future__ import annotations

import asyncio

import pyarrow as pa

from millpond.seam.arrow import ArrowWriter
from millpond.seam.bulk import Batch
from millpond.transports import connect
from millpond.transports.url import Url


class RowWriter(ArrowWriter):
    def __init__(self, url: Url, schema: str | None, table_prefix: str) -> None:
        self._runner = asyncio.Runner()
        try:
            self._store = self._runner.run(connect(url.raw, schema=schema, table_prefix=table_prefix))
        except BaseException:
            self._runner.close()
            raise

    def load(self, batch: Batch, rows: pa.Table) -> int:
        values = list(zip(*(column.to_pylist() for column in rows.columns), strict=True))
        return self._runner.run(self._store.bulk.load(batch, values))

    def close(self) -> None:
        self._runner.run(self._store.close())
        self._runner.close()
