"""The work on PostgreSQL by hand: asyncpg, the same tables, no fence, no floor, no search for lanes.

The fastest measured way that loses no message: claim by UPDATE … RETURNING over SKIP LOCKED, ack by one
DELETE … RETURNING into INSERT, on two connections that overlap, and COPY for bulk.
"""

from collections.abc import Sequence
from typing import Any

import asyncpg
import uuid_utils

from bench.side import ERROR, LEASE, PAYLOAD, PRIORITY, QUEUE, delay, drain_overlapping, now

_NOW = "(extract(epoch FROM statement_timestamp()) * 1000000)::bigint"
_COLUMNS = (
    *("id", "queue", "key", "priority", "due_at", "expires_at", "state", "headers", "payload"),
    "created_at",
)
_CLAIM = f"""
UPDATE {{p}}message SET state = 'PROCESSING', deliveries = deliveries + 1, token = $1, worker = NULL,
acquired_at = {_NOW}, lease_until = {_NOW} + $2
WHERE id = ANY(ARRAY(SELECT id FROM {{p}}message WHERE queue = $3 AND lane = $4 AND state <> 'PROCESSING'
AND due_at <= {_NOW} ORDER BY due_at, id LIMIT $5 FOR UPDATE SKIP LOCKED))
RETURNING id, queue, key, priority, headers, payload, deliveries, attempts, created_at, due_at, first_attempt_at,
expires_at, acquired_at, lease_until
"""
_ACK = f"""
WITH gone AS (DELETE FROM {{p}}message WHERE id = ANY($1::uuid[]) RETURNING *)
INSERT INTO {{p}}archive (id, queue, key, priority, due_at, expires_at, headers, payload, deliveries,
attempts, created_at, first_attempt_at, last_attempt_at, acquired_at, token, state, error, archived_at)
SELECT id, queue, key, priority, due_at, expires_at, headers, payload, deliveries, attempts + 1, created_at,
coalesce(first_attempt_at, acquired_at), {_NOW}, acquired_at, token, 'COMPLETED', last_error, {_NOW} FROM gone
"""
_NACK = f"""
UPDATE {{p}}message m SET state = 'RETRYABLE', attempts = m.attempts + 1, due_at = {_NOW} + r.delay,
first_attempt_at = coalesce(m.first_attempt_at, m.acquired_at), last_attempt_at = {_NOW}, last_error = r.error,
worker = NULL, lease_until = NULL
FROM unnest($1::uuid[], $2::bigint[], $3::text[]) AS r(id, delay, error) WHERE m.id = r.id
"""
_INSERT = f"""
INSERT INTO {{p}}message ({", ".join(_COLUMNS)})
VALUES ($1, $2, NULL, $3, {_NOW}, NULL, 'PENDING', NULL, $4, {_NOW})
"""
# As the store does, because waiting workers need it.
_NOTIFY = " RETURNING pg_notify('millpond', $2)"
# The same as the store's, because the plans must be the same.
_SETTINGS = {"plan_cache_mode": "force_generic_plan", "enable_seqscan": "off"}


class RawPostgres:
    def __init__(self, one: Any, other: Any, prefix: str) -> None:
        self._one = one
        self._other = other
        self._prefix = prefix
        self._token = 0

    @classmethod
    async def open(cls, url: str, prefix: str) -> "RawPostgres":
        one, other = [await asyncpg.connect(url, server_settings=_SETTINGS) for _ in range(2)]
        return cls(one, other, prefix)

    async def publish(self, count: int, *, notify: bool = True) -> float:
        insert = await self._one.prepare(_INSERT.format(p=self._prefix) + (_NOTIFY if notify else ""))
        began = now()
        for _ in range(count):
            await insert.fetch(uuid_utils.uuid7(), QUEUE, PRIORITY, PAYLOAD)
        return now() - began

    async def publish_bulk(self, count: int, size: int) -> float:
        began = now()
        for _ in range(count // size):
            at = await self._one.fetchval(f"SELECT {_NOW}")
            # The driver accepts these ids; creating one costs an eighth of a standard UUID.
            uuid7 = uuid_utils.uuid7
            records = [(uuid7(), QUEUE, None, PRIORITY, at, None, "PENDING", None, PAYLOAD, at) for _ in range(size)]
            await self._one.copy_records_to_table(f"{self._prefix}message", columns=_COLUMNS, records=records)
        return now() - began

    async def drain(self, count: int, batch: int) -> float:
        ack = await self._other.prepare(_ACK.format(p=self._prefix))

        async def ack_all(rows: Sequence[Any]) -> None:
            await ack.fetch([row[0] for row in rows])

        return await drain_overlapping(await self._claimer(batch), ack_all, count)

    async def nack(self, count: int, batch: int) -> float:
        claim = await self._claimer(batch)
        nack = await self._other.prepare(_NACK.format(p=self._prefix))
        claimed = [await claim() for _ in range(count // batch)]
        began = now()
        for rows in claimed:
            ids = [row[0] for row in rows]
            delays = [delay(n) * 1_000_000 for n in range(len(rows))]
            await nack.fetch(ids, delays, [ERROR] * len(rows))
        return now() - began

    async def _claimer(self, batch: int) -> Any:
        claim = await self._one.prepare(_CLAIM.format(p=self._prefix))

        async def take() -> Any:
            self._token += 1
            return await claim.fetch(self._token, LEASE * 1_000_000, QUEUE, PRIORITY, batch)

        return take

    async def close(self) -> None:
        await self._one.close()
        await self._other.close()
