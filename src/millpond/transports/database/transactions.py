"""The transactions room: publish, settle and once on the caller's own connection.

It needs a dialect and no pooled connection; synchronous programs use it without connecting.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from typing import Any
from uuid import UUID

from millpond.clock import micros, monotonic
from millpond.errors import ShardMapMismatch, WrongShard
from millpond.message import Draft, Message, Published, Receipt, check_text, draft
from millpond.outcome import Outcome
from millpond.seam.transactions import Transactions
from millpond.transports.database.borrowed import transaction
from millpond.transports.database.borrowed.identity import OwnDatabase
from millpond.transports.database.messages.hints import Hints
from millpond.transports.database.messages.publish import Inserted, are_new, insert_drafts, publish_results
from millpond.transports.database.messages.settle import SettleResult, write_outcomes
from millpond.transports.database.options import StoreOptions
from millpond.transports.database.shards import describe, lock_record, misplaced, read_record
from millpond.transports.database.sql.dialect import NOW, Dialect
from millpond.transports.database.sql.statement import Many, Query, Steps
from millpond.transports.shard_map import alone
from millpond.transports.validation import check_outcomes

# The transaction that inserts the row is first; a conflict is no error and cannot abort the caller's transaction.
# A transaction that is still open makes the second wait for its end.
_ENTER = "INSERT INTO {once} (id, {key}, token, at) VALUES (:id, :key, :token, :at) {or_skip}"
_ENTERED = "SELECT token FROM {once} WHERE id = :id AND {key} = :key"

CHECK_MAP_EVERY = 1.0
"""Seconds of use after which a publish reads again whether the database has become a shard."""


class DatabaseTransactions:
    """Steps on the caller's connection."""

    def __init__(
        self,
        dialect: Dialect,
        options: StoreOptions,
        hints: Hints,
        check_open: Callable[[], None] = lambda: None,
        *,
        sharded: bool = False,
        own: OwnDatabase | None = None,
    ) -> None:
        self._d = dialect
        self._options = options
        self._hints = hints
        self._check_open = check_open
        self._own = own or OwnDatabase()
        self._sharded = sharded
        """Whether the pond has several databases. The row of the caller's database names its shard."""
        self._check_at = 0.0
        self._dedupe_for = micros(options.dedupe_for, "dedupe_for")

    async def publish(self, messages: Sequence[Message], *, within: Any) -> list[Published]:
        drafts = self._drafts(messages)
        check = self._must_check()
        one = not check and self._d.writes.is_one_statement(drafts, new=are_new(drafts), own_connection=False)
        steps = self._publish_steps(drafts, check=check)
        return self._published(drafts, await transaction.run(self._d, within, steps, self._own, one_statement=one))

    def publish_sync(self, messages: Sequence[Message], *, within: Any) -> list[Published]:
        drafts = self._drafts(messages)
        check = self._must_check()
        one = not check and self._d.writes.is_one_statement(drafts, new=are_new(drafts), own_connection=False)
        steps = self._publish_steps(drafts, check=check)
        return self._published(drafts, transaction.run_sync(self._d, within, steps, self._own, one_statement=one))

    def _drafts(self, messages: Sequence[Message]) -> list[Draft]:
        self._check_open()
        return [draft(message, body_limit=self._options.body_limit) for message in messages]

    def _must_check(self) -> bool:
        """Whether to read the shard map: always in a pond of shards, otherwise once in a second of use."""
        if self._sharded:
            return True
        if monotonic() < self._check_at:
            return False
        self._check_at = monotonic() + CHECK_MAP_EVERY
        return True

    def _publish_steps(self, drafts: Sequence[Draft], *, check: bool) -> Steps[Inserted]:
        if check:
            yield from self._check_shard(drafts)
        return (yield from self._insert_steps(drafts))

    def _check_shard(self, drafts: Sequence[Draft]) -> Steps[None]:
        record = yield from (lock_record(self._d) if self._sharded else read_record(self._d))
        if not self._sharded:
            if record is not None and len(record.map.shards) > 1:
                self._check_at = monotonic()
                raise alone(record, "the database of this connection")
            return
        if record is None:
            raise ShardMapMismatch(
                "the database of this connection has no shard map, and the pond has several databases; give a "
                "connection to one of its shards"
            )
        if (wrong := misplaced(record, drafts)) is not None:
            draft, owner = wrong
            raise WrongShard(
                f"{describe(draft)} belongs to shard {owner!r}, and this connection is to shard {record.name!r}; "
                "within a transaction publish only messages of its own shard"
            )

    def _insert_steps(self, drafts: Sequence[Draft]) -> Steps[Inserted]:
        return insert_drafts(
            self._d,
            drafts,
            now=self._now(),
            dedupe_for=self._dedupe_for,
            own_connection=False,
            notify=self._options.notify,
        )

    def _published(self, drafts: Sequence[Draft], new: Inserted) -> list[Published]:
        self._hints.published(drafts)
        return publish_results(drafts, new)

    async def settle(self, outcomes: Sequence[Outcome], *, within: Any) -> list[Receipt]:
        if not self._check(outcomes):
            return []
        return self._settled(outcomes, await transaction.run(self._d, within, self._settle_steps(outcomes), self._own))

    def settle_sync(self, outcomes: Sequence[Outcome], *, within: Any) -> list[Receipt]:
        if not self._check(outcomes):
            return []
        return self._settled(outcomes, transaction.run_sync(self._d, within, self._settle_steps(outcomes), self._own))

    def _check(self, outcomes: Sequence[Outcome]) -> bool:
        self._check_open()
        check_outcomes(outcomes)
        return bool(outcomes)

    def _settle_steps(self, outcomes: Sequence[Outcome]) -> Steps[SettleResult]:
        return write_outcomes(self._d, outcomes, now=self._now(), wait=True, notify=self._options.notify)

    def _settled(self, outcomes: Sequence[Outcome], settled: SettleResult) -> list[Receipt]:
        self._hints.settled(outcomes, clock_stands=self._now() is not None)
        return settled.refused

    async def once(self, id: UUID, key: str, *, within: Any) -> bool:
        self._check_open()
        return await transaction.run(self._d, within, self._once(id, key), self._own)

    def once_sync(self, id: UUID, key: str, *, within: Any) -> bool:
        self._check_open()
        return transaction.run_sync(self._d, within, self._once(id, key), self._own)

    def learn_from(self, other: Transactions) -> None:
        if isinstance(other, DatabaseTransactions):
            self._own.learn(other._own.identity)

    def _once(self, id_: UUID, key: str) -> Steps[bool]:
        label = check_text(key, "key")
        token = secrets.randbits(62)
        at = (yield Query(self._d.sql(NOW), {"now": self._now()}))[0][0]
        row = {"id": self._d.id_in(id_), "key": label}
        yield Many(self._d.sql(_ENTER), ("id", "key", "token", "at"), [(*row.values(), token, at)])
        rows = yield Query(self._d.sql(_ENTERED), row)
        return bool(rows) and rows[0][0] == token

    def _now(self) -> int | None:
        return self._options.clock.now()
