"""Into PostgreSQL through ADBC: COPY in binary straight from Arrow, no Python value per row."""

from __future__ import annotations

import time
from typing import Any

import adbc_driver_manager as adbc
import pyarrow as pa

from millpond.clock import SECOND, micros, monotonic
from millpond.errors import StoreUnavailable
from millpond.transports.database.fetch.postgres import PostgresFetcher
from millpond.transports.database.options import StoreOptions
from millpond.transports.database.staging import ENTER_LOT, Batch, new_lot
from millpond.transports.url import Url

_PATIENCE = micros(StoreOptions().reconnect_timeout, "reconnect_timeout") / SECOND


class PostgresLoader:
    def __init__(self, url: Url, schema: str | None, table_prefix: str) -> None:
        self._where = (url, schema, table_prefix)
        self._connection = _Connection(*self._where)

    def load(self, batch: Batch, rows: pa.Table) -> int:
        """Tried again after a lost connection, as lots of which only the last counts; the others are orphans."""
        give_up_at = monotonic() + _PATIENCE
        while True:
            try:
                return self._connection.load(batch, rows)
            except StoreUnavailable:
                if monotonic() > give_up_at:
                    raise
            self._reconnect(give_up_at)

    def _reconnect(self, give_up_at: float) -> None:
        self.close()
        while True:
            try:
                self._connection = _Connection(*self._where)
                return
            except StoreUnavailable:
                if monotonic() > give_up_at:
                    raise
                time.sleep(0.2)

    def close(self) -> None:
        self._connection.close()

    def __enter__(self) -> PostgresLoader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _Connection(PostgresFetcher):
    def load(self, batch: Batch, rows: pa.Table) -> int:
        lot = new_lot()
        self.rows(ENTER_LOT, {"lot": lot, "batch": batch.number, "writer": batch.writer, "now": None})
        numbered = rows.add_column(0, "lot", pa.repeat(pa.scalar(lot, pa.int64()), rows.num_rows))
        options = {
            "adbc.ingest.target_table": self.dialect.table("staging"),
            "adbc.ingest.mode": "adbc.ingest.mode.append",
        }
        if self.dialect.schema is not None:
            options["adbc.ingest.target_db_schema"] = self.dialect.schema
        statement = adbc.AdbcStatement(self._connection)
        try:
            statement.set_options(**options)
            stream = adbc.ArrowArrayStreamHandle()
            numbered.to_reader()._export_to_c(stream.address)
            statement.bind_stream(stream)
            statement.execute_update()
            self._connection.commit()
        except adbc.Error as e:
            raise self._meaning(e) from None
        finally:
            statement.close()
        return lot


def open_loader(url: Url, **options: Any) -> PostgresLoader:
    return PostgresLoader(url, **options)
