"""Writes Arrow tables into PostgreSQL through ADBC: binary COPY, no Python value per row."""

from __future__ import annotations

import time
from collections.abc import Collection
from typing import TypeVar

import adbc_driver_manager as adbc
import pyarrow as pa
import pyarrow.compute as pc

from millpond.clock import SECOND, micros, monotonic
from millpond.errors import StoreUnavailable
from millpond.message import State
from millpond.seam.arrow import ArrowWriter, PartWriter
from millpond.seam.bulk import Batch, Written
from millpond.transports.database import bulk
from millpond.transports.database.options import StoreOptions
from millpond.transports.database.postgres.reader import PostgresReader
from millpond.transports.database.shards import check_routed
from millpond.transports.database.sql.dialect import NOW
from millpond.transports.database.sql.statement import Query, Rows, Step, Steps, drive
from millpond.transports.shard_map import ShardRecord
from millpond.transports.url import Url

T = TypeVar("T")

_PATIENCE = micros(StoreOptions().reconnect_timeout, "reconnect_timeout") / SECOND


class PostgresWriter(ArrowWriter):
    def __init__(self, url: Url, schema: str | None, table_prefix: str) -> None:
        self._where = (url, schema, table_prefix)
        self._connection = _Connection(*self._where)

    def load(self, batch: Batch, rows: pa.Table) -> int:
        """Retry after a lost connection. Each try has its own lot; only the last one counts, the others are orphans."""
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


class PostgresPartWriter(PartWriter):
    def __init__(self, url: Url, batch: Batch, number: int, schema: str | None, table_prefix: str) -> None:
        self._url = url
        self._batch = batch
        self._number = number
        self._size = 0
        self._connection = _Connection(url, schema, table_prefix)
        try:
            self._connection.rows(_KEEP_ALIVE, {})
            self._at: int = self._connection.rows(NOW, {"now": None})[0][0]
        except BaseException:
            self._connection.close()
            raise

    def load(self, rows: pa.Table) -> None:
        self._size += rows.num_rows
        self._connection.ingest("message", self._published(rows))

    def _published(self, rows: pa.Table) -> pa.Table:
        count = rows.num_rows
        due = rows.schema.get_field_index("due_at")
        rows = rows.set_column(due, "due_at", pc.fill_null(rows.column("due_at"), self._at))
        rows = rows.append_column("state", pa.repeat(State.PENDING.value, count))
        return rows.append_column("created_at", pa.repeat(pa.scalar(self._at, pa.int64()), count))

    def commit(self, queues: Collection[str], *, routed: ShardRecord | None = None) -> Written:
        """Take the lock only here: a slow task must not make its own speculative copy wait."""
        d = self._connection.dialect
        before = self._connection.drive(bulk.lock_part(d, self._batch, self._number, None))
        if before is not None:
            bulk.check_same(self._batch, self._number, before, self._size)
            return Written(self._size, 0, again=True)
        self._connection.drive(check_routed(d, routed, f"the database at {self._url}"))
        for queue in queues:
            self._connection.rows(_ANNOUNCE, {"channel": d.channel, "queue": queue})
        self._connection.drive(bulk.record_part(d, self._batch, self._number, self._size, None))
        self._connection.commit()
        return Written(self._size, self._size)

    def close(self) -> None:
        self._connection.close()


# TCP keepalive: without it the transaction of a dead host would stay open.
_KEEP_ALIVE = """
SELECT set_config('tcp_keepalives_idle', '5', true), set_config('tcp_keepalives_interval', '2', true),
set_config('tcp_keepalives_count', '3', true)
"""
_ANNOUNCE = "SELECT pg_notify(:channel::text, :queue::text)"


class _Connection(PostgresReader):
    """A transaction from the first statement on. Closed without a commit, it leaves nothing behind."""

    def load(self, batch: Batch, rows: pa.Table) -> int:
        lot = bulk.new_lot()
        self.rows(bulk.ENTER_LOT, {"lot": lot, "batch": batch.number, "writer": batch.writer, "now": None})
        self.ingest("staging", rows.add_column(0, "lot", pa.repeat(pa.scalar(lot, pa.int64()), rows.num_rows)))
        self.commit()
        return lot

    def drive(self, steps: Steps[T]) -> T:
        """Run steps that consist of queries only."""

        def run(step: Step) -> Rows:
            assert isinstance(step, Query)
            return self.rows(step.statement.text, step.params)

        return drive(steps, run)

    def ingest(self, table: str, rows: pa.Table) -> None:
        options = {"adbc.ingest.target_table": self.dialect.table(table), "adbc.ingest.mode": "adbc.ingest.mode.append"}
        if self.dialect.schema is not None:
            options["adbc.ingest.target_db_schema"] = self.dialect.schema
        stream = adbc.ArrowArrayStreamHandle()
        rows.to_reader()._export_to_c(stream.address)
        try:
            with adbc.AdbcStatement(self._connection) as statement:
                statement.set_options(**options)
                statement.bind_stream(stream)
                statement.execute_update()
        except adbc.Error as e:
            raise self._translated(e) from None

    def commit(self) -> None:
        try:
            self._connection.commit()
        except adbc.Error as e:
            raise self._translated(e) from None
