"""The work on SQLite by hand: the standard module, one connection, no thread, the same tables, no fence.

Claim = UPDATE … RETURNING; ack = INSERT … SELECT, then DELETE; there is one writer, and nothing overlaps.
"""

import sqlite3
from collections.abc import Sequence
from typing import Any

import uuid_utils

from bench.side import ERROR, LEASE, PAYLOAD, PRIORITY, QUEUE, delay, now

_NOW = "CAST(round((julianday('now') - 2440587.5) * 86400000.0) AS INTEGER) * 1000"
_CLAIM = f"""
UPDATE {{p}}message SET state = 'PROCESSING', deliveries = deliveries + 1, token = ?, worker = NULL,
acquired_at = {_NOW}, lease_until = {_NOW} + ?
WHERE id IN (SELECT id FROM {{p}}message INDEXED BY {{p}}message_claim WHERE queue = ? AND lane = ?
AND state <> 'PROCESSING' AND due_at <= {_NOW} ORDER BY due_at, id LIMIT ?)
RETURNING id, queue, key, priority, headers, payload, deliveries, attempts, created_at, due_at, first_attempt_at,
expires_at, acquired_at, lease_until
"""
_KEEP = f"""
INSERT INTO {{p}}archive (id, queue, key, priority, due_at, expires_at, headers, payload, deliveries,
attempts, created_at, first_attempt_at, last_attempt_at, acquired_at, token, state, error, archived_at)
SELECT id, queue, key, priority, due_at, expires_at, headers, payload, deliveries, attempts + 1, created_at,
coalesce(first_attempt_at, acquired_at), {_NOW}, acquired_at, token, 'COMPLETED', last_error, {_NOW}
FROM {{p}}message WHERE id IN ({{ids}})
"""
_REMOVE = "DELETE FROM {p}message WHERE id IN ({ids})"
_NACK = f"""
UPDATE {{p}}message SET state = 'RETRYABLE', attempts = attempts + 1, due_at = {_NOW} + ?,
first_attempt_at = coalesce(first_attempt_at, acquired_at), last_attempt_at = {_NOW}, last_error = ?, worker = NULL,
lease_until = NULL WHERE id = ?
"""
_INSERT = """
INSERT INTO {p}message (id, queue, key, priority, due_at, expires_at, state, headers, payload, created_at)
VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)
"""


class RawSqlite:
    def __init__(self, path: str, prefix: str) -> None:
        self._prefix = prefix
        self._token = 0
        self._connection = sqlite3.connect(path, isolation_level=None, cached_statements=256)
        self._connection.execute("PRAGMA journal_mode = WAL")
        self._connection.execute("PRAGMA synchronous = FULL")

    async def publish(self, count: int, *, notify: bool = True) -> float:
        insert = _INSERT.format(p=self._prefix)
        began = now()
        for _ in range(count):
            with self._transaction():
                self._connection.execute(insert, self._record(self._clock()))
        return now() - began

    async def publish_bulk(self, count: int, size: int) -> float:
        insert = _INSERT.format(p=self._prefix)
        began = now()
        for _ in range(count // size):
            with self._transaction():
                at = self._clock()
                self._connection.executemany(insert, [self._record(at) for _ in range(size)])
        return now() - began

    async def drain(self, count: int, batch: int) -> float:
        began = now()
        for _ in range(count // batch):
            ids = [row[0] for row in self._claim(batch)]
            with self._transaction():
                self._connection.execute(self._over(_KEEP, ids), ids)
                self._connection.execute(self._over(_REMOVE, ids), ids)
        return now() - began

    async def nack(self, count: int, batch: int) -> float:
        claimed = [self._claim(batch) for _ in range(count // batch)]
        nack = _NACK.format(p=self._prefix)
        began = now()
        for rows in claimed:
            with self._transaction():
                values = [(delay(n) * 1_000_000, ERROR, row[0]) for n, row in enumerate(rows)]
                self._connection.executemany(nack, values)
        return now() - began

    async def close(self) -> None:
        self._connection.close()

    def _claim(self, batch: int) -> list[Any]:
        self._token += 1
        with self._transaction():
            values = (self._token, LEASE * 1_000_000, QUEUE, PRIORITY, batch)
            rows = self._connection.execute(_CLAIM.format(p=self._prefix), values).fetchall()
        if len(rows) != batch:
            raise RuntimeError(f"claimed {len(rows)} messages instead of {batch}")
        return rows

    def _record(self, at: int) -> tuple[Any, ...]:
        return (uuid_utils.uuid7().bytes, QUEUE, None, PRIORITY, at, None, "PENDING", None, PAYLOAD, at)

    def _clock(self) -> int:
        ((at,),) = self._connection.execute(f"SELECT {_NOW}")
        return int(at)

    def _over(self, text: str, ids: Sequence[bytes]) -> str:
        return text.format(p=self._prefix, ids=", ".join(["?"] * len(ids)))

    def _transaction(self) -> "_Transaction":
        return _Transaction(self._connection)


class _Transaction:
    def __init__(self, connection: sqlite3.Connection) -> None:
        self._connection = connection

    def __enter__(self) -> None:
        self._connection.execute("BEGIN IMMEDIATE")

    def __exit__(self, kind: object, *_: object) -> None:
        self._connection.execute("ROLLBACK" if kind else "COMMIT")
