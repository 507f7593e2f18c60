"""The work on MariaDB by hand: asyncmy, the same tables, no fence, no search for lanes.

Claim = SELECT … FOR UPDATE SKIP LOCKED, then UPDATE; ack = INSERT … SELECT, then DELETE; each pair is one
transaction, and the two overlap on two connections.
"""

import json
from collections.abc import Sequence
from typing import Any

import asyncmy
import uuid_utils

from bench.side import ERROR, LEASE, PAYLOAD, PRIORITY, QUEUE, delay, drain_overlapping, now

_NOW = "timestampdiff(MICROSECOND, '1970-01-01', utc_timestamp(6))"
_CLAIM = f"""
SELECT id, queue, `key`, priority, headers, payload, deliveries, attempts, created_at, due_at, first_attempt_at,
expires_at, {_NOW} FROM {{p}}message FORCE INDEX ({{p}}message_claim)
WHERE queue = %s AND ready = 1 AND lane = %s AND due_at <= {_NOW} ORDER BY due_at, id LIMIT %s
FOR UPDATE SKIP LOCKED
"""
_STAMP = """
UPDATE {p}message SET state = 'PROCESSING', deliveries = deliveries + 1, token = %s, worker = NULL, acquired_at = %s,
lease_until = %s WHERE id IN ({ids})
"""
_KEEP = f"""
INSERT INTO {{p}}archive (id, queue, `key`, priority, due_at, expires_at, headers, payload, deliveries,
attempts, created_at, first_attempt_at, last_attempt_at, acquired_at, token, state, error, archived_at)
SELECT id, queue, `key`, priority, due_at, expires_at, headers, payload, deliveries, attempts + 1, created_at,
coalesce(first_attempt_at, acquired_at), {_NOW}, acquired_at, token, 'COMPLETED', last_error, {_NOW}
FROM {{p}}message WHERE id IN ({{ids}})
"""
_REMOVE = "DELETE FROM {p}message WHERE id IN ({ids})"
_NACK = f"""
UPDATE JSON_TABLE(%s, '$[*]' COLUMNS (id CHAR(32) PATH '$[0]', delay BIGINT PATH '$[1]',
error LONGTEXT PATH '$[2]')) AS r STRAIGHT_JOIN {{p}}message m ON m.id = UNHEX(r.id)
SET m.state = 'RETRYABLE', m.attempts = m.attempts + 1, m.due_at = {_NOW} + r.delay,
m.first_attempt_at = coalesce(m.first_attempt_at, m.acquired_at), m.last_attempt_at = {_NOW},
m.last_error = r.error, m.worker = NULL, m.lease_until = NULL
"""
_INSERT = """
INSERT INTO {p}message (id, queue, `key`, priority, due_at, expires_at, state, headers, payload, created_at)
VALUES (%s, %s, %s, %s, %s, %s, %s, %s, %s, %s)
"""


class RawMysql:
    def __init__(self, one: Any, other: Any, prefix: str) -> None:
        self._one = one
        self._other = other
        self._prefix = prefix
        self._token = 0

    @classmethod
    async def open(cls, login: dict[str, Any], prefix: str) -> "RawMysql":
        one, other = [await asyncmy.connect(**login, autocommit=True, charset="utf8mb4") for _ in range(2)]
        for connection in (one, other):
            await _run(connection, "SET SESSION TRANSACTION ISOLATION LEVEL READ COMMITTED")
        return cls(one, other, prefix)

    async def publish(self, count: int, *, notify: bool = True) -> float:
        insert = _INSERT.format(p=self._prefix).replace("%s, %s, %s, %s, %s", f"%s, %s, %s, %s, {_NOW}", 1)
        insert = insert[: insert.rindex("%s")] + _NOW + ")"
        began = now()
        for _ in range(count):
            values = (uuid_utils.uuid7().bytes, QUEUE, None, PRIORITY, None, "PENDING", None, PAYLOAD)
            await _run(self._one, insert, values)
        return now() - began

    async def publish_bulk(self, count: int, size: int) -> float:
        insert = _INSERT.format(p=self._prefix)
        began = now()
        for _ in range(count // size):
            ((at,),) = await _run(self._one, f"SELECT {_NOW}")
            uuid7 = uuid_utils.uuid7
            records = [
                (uuid7().bytes, QUEUE, None, PRIORITY, at, None, "PENDING", None, PAYLOAD, at) for _ in range(size)
            ]
            await self._one.begin()
            async with self._one.cursor() as cursor:
                await cursor.executemany(insert, records)
            await self._one.commit()
        return now() - began

    async def drain(self, count: int, batch: int) -> float:
        async def ack(rows: Sequence[Any]) -> None:
            ids = [row[0] for row in rows]
            await self._other.begin()
            await _run(self._other, self._over(_KEEP, ids), ids)
            await _run(self._other, self._over(_REMOVE, ids), ids)
            await self._other.commit()

        return await drain_overlapping(self._claimer(batch), ack, count)

    async def nack(self, count: int, batch: int) -> float:
        claim = self._claimer(batch)
        claimed = [await claim() for _ in range(count // batch)]
        nack = _NACK.format(p=self._prefix)
        began = now()
        for rows in claimed:
            values = [(row[0].hex(), delay(n) * 1_000_000, ERROR) for n, row in enumerate(rows)]
            await _run(self._other, nack, (json.dumps(values),))
        return now() - began

    def _claimer(self, batch: int) -> Any:
        select = _CLAIM.format(p=self._prefix)

        async def claim() -> Any:
            self._token += 1
            await self._one.begin()
            rows = await _run(self._one, select, (QUEUE, PRIORITY, batch))
            if rows:
                ids = [row[0] for row in rows]
                at = rows[0][12]
                values = (self._token, at, at + LEASE * 1_000_000, *ids)
                await _run(self._one, self._over(_STAMP, ids), values)
            await self._one.commit()
            return rows

        return claim

    def _over(self, text: str, ids: Sequence[bytes]) -> str:
        return text.format(p=self._prefix, ids=", ".join(["%s"] * len(ids)))

    async def close(self) -> None:
        self._one.close()
        self._other.close()


async def _run(connection: Any, text: str, values: Sequence[Any] = ()) -> Any:
    async with connection.cursor() as cursor:
        await cursor.execute(text, values)
        return await cursor.fetchall()
