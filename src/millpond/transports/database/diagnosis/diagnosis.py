"""The diagnosis room: the circumstances of a message, and faults of the database."""

from __future__ import annotations

import time
from uuid import UUID

from millpond.clock import SECOND
from millpond.errors import MissingRight
from millpond.message import check_id
from millpond.seam.diagnosis import Circumstances, Finding, ShardHealth
from millpond.transports.database.diagnosis.circumstances import circumstances, is_locked
from millpond.transports.database.runner import Room, read, write
from millpond.transports.database.sql.dialect import NOW
from millpond.transports.database.sql.statement import Query, Steps

_CLOCKS_APART = 2.0
"""Seconds by which the clocks of the database and of this machine may differ."""
_BY_LEASE = "SELECT count(*) FROM {worker} WHERE by_lock = 0"


class DatabaseDiagnosis(Room):
    async def circumstances(self, id: UUID) -> Circumstances:
        self.runner.check_open()
        wanted = check_id(id)
        try:
            locked = await self._is_locked(wanted)
        except MissingRight:  # an account that may only read: the other reasons are found
            locked = False
        return await self._circumstances(wanted, locked)

    @write
    def _is_locked(self, id: UUID) -> Steps[bool]:
        return is_locked(self.d, id)

    @read
    def _circumstances(self, id: UUID, locked: bool) -> Steps[Circumstances]:
        return circumstances(self.d, id, self.now, locked=locked)

    async def shards(self) -> list[ShardHealth]:
        self.runner.check_open()
        return []

    async def examine(self) -> list[Finding]:
        self.runner.check_open()
        try:
            found = await self._examine()
        except MissingRight as e:  # only accounts with rights of the whole server see transactions in MySQL
            found = [
                Finding(
                    kind="not-checked",
                    severity="warning",
                    text=f"transactions held open and dead rows were not looked for: {e}",
                    remedy="grant the right, or use an account that has it",
                )
            ]
        if not self.runner.options.pooler and await self._workers_by_lease():
            found.append(
                Finding(
                    kind="pooler",
                    severity="warning",
                    text="the sessions of a worker keep changing, as behind a pooler in transaction mode: its death is "
                    "noticed only by its lease",
                    remedy="connect workers past the pooler, or give the option pooler=true",
                )
            )
        return found + await self._clocks()

    @read
    def _examine(self) -> Steps[list[Finding]]:
        return self.d.examine()

    @read
    def _workers_by_lease(self) -> Steps[int]:
        return int((yield Query(self.d.sql(_BY_LEASE), {}))[0][0])

    async def _clocks(self) -> list[Finding]:
        if self.now is not None:  # a test's clock
            return []
        before = time.time()
        at = await self._time() / SECOND
        off = max(before - at, at - time.time())
        if off <= _CLOCKS_APART:
            return []
        return [
            Finding(
                kind="clocks",
                severity="warning",
                text=f"the clock of the database and that of this machine differ by {off:.0f} s",
                remedy="let NTP set both; Millpond uses the database's clock, your programs may not",
            )
        ]

    @read
    def _time(self) -> Steps[int]:
        return int((yield Query(self.d.sql(NOW), {"now": None}))[0][0])
