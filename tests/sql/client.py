"""A client of the SQL functions and procedures alone: publish, claim, extend and settle, for the conformance suite.

Everything else (rooms, wait, close) is the store's, because the suite looks at the tables through it.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID

import msgspec
import psycopg
import pymysql

from millpond import Ack, Capability, Claim, GiveBack, Message, Nack, Outcome, Published, Receipt, Reject
from millpond.checks import integer
from millpond.clock import SECOND, Seconds, micros
from millpond.message import Draft, draft, short_error
from millpond.transports.database.store import DatabaseStore
from millpond.transports.shares import Shares
from millpond.transports.validation import check_outcomes, check_receipts, lease_to_claim, queue_names
from tests.rooms.transactions.callers import address

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_TOKENS = range(-(2**63), 2**63)


class Calls:
    """Calls of one database's functions."""

    connection: Any

    def call(self, name: str, *args: Any) -> list[tuple[Any, ...]]:
        raise NotImplementedError

    def many(self, name: str, ids: Sequence[UUID], token: int, *args: Any) -> set[UUID]:
        """Call a function that settles or extends; returns the stale ids."""
        raise NotImplementedError

    def set_time(self, now: int | None) -> None:
        raise NotImplementedError

    def time(self, moment: datetime | None) -> Any:
        return moment


class PostgresCalls(Calls):
    def __init__(self, url: str) -> None:
        self.connection = psycopg.connect(url, autocommit=True)

    def call(self, name: str, *args: Any) -> list[tuple[Any, ...]]:
        marks = ", ".join(["%s"] * len(args))
        return self.connection.execute(f"SELECT * FROM millpond_{name}({marks})", args).fetchall()

    def many(self, name: str, ids: Sequence[UUID], token: int, *args: Any) -> set[UUID]:
        return {row[0] for row in self.call(f"{name}_many", list(ids), token, *args)}

    def set_time(self, now: int | None) -> None:
        self.connection.execute("SELECT set_config('millpond.now', %s, false)", (str(now or ""),))


class MysqlCalls(Calls):
    def __init__(self, url: str) -> None:
        self.connection = pymysql.connect(**address(url), autocommit=True, charset="utf8mb4")

    def call(self, name: str, *args: Any) -> list[tuple[Any, ...]]:
        with self.connection.cursor() as cursor:
            cursor.execute(f"CALL millpond_{name}({', '.join(['%s'] * len(args))})", args)
            rows = list(cursor.fetchall())
            while cursor.nextset():
                pass
            return rows

    def many(self, name: str, ids: Sequence[UUID], token: int, *args: Any) -> set[UUID]:
        return {UUID(row[0]) for row in self.call(name, json.dumps([str(id_) for id_ in ids]), token, *args)}

    def set_time(self, now: int | None) -> None:
        with self.connection.cursor() as cursor:
            cursor.execute("SET @millpond_now = %s", (now,))

    def time(self, moment: datetime | None) -> Any:
        return None if moment is None else moment.astimezone(UTC).replace(tzinfo=None)


class SqlStore:
    """The six verbs over SQL functions."""

    def __init__(self, store: DatabaseStore, calls: Calls) -> None:
        self._store = store
        self._calls = calls
        self._turn = 0
        lacking = Capability.TRANSACTIONS | Capability.CLAIM_BY_ID
        self.capabilities = store.capabilities & ~lacking

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    async def publish(self, messages: Sequence[Message]) -> list[Published]:
        drafts = [draft(message) for message in messages]
        self._now()
        return [self._publish(d) for d in drafts]

    def _publish(self, d: Draft) -> Published:
        now = self._store.runner.now() or 0
        expires = d.expires_us if d.expires_after_us is None else now + d.expires_after_us
        ((id_, new),) = self._calls.call(
            "publish",
            *(d.queue, None, str(d.id) if d.given else None, d.key, d.priority, self._time(d.due_us)),
            *(d.delay_us / SECOND if d.delay_us else None, self._time(expires), d.headers, d.payload),
        )
        return Published(UUID(str(id_)), bool(new))

    def _time(self, us: int | None) -> Any:
        return self._calls.time(None if us is None else _EPOCH + timedelta(microseconds=us))

    async def claim(
        self, queues: Sequence[str], limit: int = 1, lease: Seconds = 30, *, max_deliveries: int | None = None
    ) -> list[Claim]:
        names, lease_us = queue_names(queues), lease_to_claim(lease)
        integer(limit, "limit")
        if not names:
            return []
        self._now()
        self._turn += 1
        claims: list[Claim] = []
        shares = Shares(names, limit, self._turn)
        for name, share in shares:
            rows = self._calls.call("claim", name, share, lease_us / SECOND)
            claims += [_claim(name, row) for row in rows]
            shares.taken += len(rows)
        return claims

    async def extend(self, receipts: Sequence[Receipt], lease: Seconds = 30) -> list[Receipt]:
        check_receipts(receipts)
        seconds = micros(lease, "lease") / SECOND
        self._now()
        return [receipt for receipt in dict.fromkeys(receipts) if self._refuses("extend", receipt, seconds)]

    async def settle(self, outcomes: Sequence[Outcome]) -> list[Receipt]:
        check_outcomes(outcomes)
        calls = {}
        for outcome in outcomes:
            calls.setdefault(outcome.receipt, _call(outcome))  # the first one counts
        self._now()
        groups: dict[tuple[Any, ...], list[Receipt]] = {}
        for receipt, call in calls.items():
            groups.setdefault((receipt.token, *call), []).append(receipt)
        refused = []
        for (token, name, *args), receipts in groups.items():
            if token not in _TOKENS:
                refused += receipts
                continue
            stale = self._calls.many(name, [receipt.id for receipt in receipts], token, *args)
            refused += [receipt for receipt in receipts if receipt.id in stale]
        return refused

    def _refuses(self, name: str, receipt: Receipt, *args: Any) -> bool:
        return receipt.token not in _TOKENS or bool(self._calls.many(name, [receipt.id], receipt.token, *args))

    def _now(self) -> None:
        self._calls.set_time(self._store.runner.now())

    async def close(self) -> None:
        self._calls.connection.close()
        await self._store.close()


def _call(outcome: Outcome) -> tuple[Any, ...]:
    match outcome:
        case Ack():
            return ("ack",)
        case Nack(delay=delay, error=error):
            # Without a policy of the queue a transport tries again at once, and SQL by the default policy.
            return ("nack", 0.0 if delay is None else micros(delay, "delay") / SECOND, short_error(error))
        case Reject(reason=reason, error=error):
            return ("reject", short_error(reason), short_error(error))
        case GiveBack(delay=None):
            return ("give_back", None)
        case GiveBack(delay=delay):
            return ("give_back", micros(delay, "delay") / SECOND)
    raise AssertionError(outcome)


def _claim(queue: str, row: Sequence[Any]) -> Claim:
    id_, token, body, payload, headers, key, priority, deliveries, attempts, crashes, *times = row
    created, due, first, expires, claimed, until = map(_us, times)
    message = Message(
        queue=queue,
        payload=bytes(payload) if body is None else body.encode(),
        id=UUID(str(id_)),
        key=key,
        priority=priority,
        headers=(msgspec.json.decode(headers) if isinstance(headers, str) else headers) or {},
    )
    receipt = Receipt(UUID(str(id_)), token)
    counts = (deliveries, attempts, created or 0, due or 0, claimed or 0, until or 0, first, expires)
    return Claim(message, receipt, *counts, None, crashes)


def _us(moment: datetime | None) -> int | None:
    if moment is None:
        return None
    moment = moment if moment.tzinfo else moment.replace(tzinfo=UTC)
    return (moment - _EPOCH) // timedelta(microseconds=1)
