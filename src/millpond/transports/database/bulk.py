"""Bulk writes on our own connections: load lots, publish them as one, collect what is left over."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from millpond.clock import micros
from millpond.transports.database import staging
from millpond.transports.database.engine import Mode
from millpond.transports.database.running import Running
from millpond.transports.database.staging import WHOLE, Batch, Written
from millpond.transports.database.statement import Steps


class Bulk(Running):
    """What a writer of whole batches asks of a store."""

    async def load(self, batch: Batch, rows: Sequence[Sequence[Any]]) -> int:
        """Stage rows (id, due_at, priority, queue, key, headers, payload); returns the number of their lot."""
        self._check_open()
        numbers: list[int] = []

        def steps(again: bool) -> Steps[None]:
            # Each try has a lot of its own: one that was committed without our knowing is an orphan.
            numbers.append(staging.new_lot())
            return staging.load(self.dialect, batch, numbers[-1], rows, self._now())

        await self._run(steps, Mode.WRITE)
        return numbers[-1]

    async def published(self, batch: Batch, part: int = WHOLE) -> int | None:
        """How many rows the batch, or this part of it, was published with; None: not yet."""
        self._check_open()
        return await self._run(lambda again: staging.published(self.dialect, batch, part), Mode.READ)

    async def publish_lots(
        self,
        batch: Batch,
        lots: Mapping[int, int],
        *,
        part: int = WHOLE,
        given: bool = False,
        copies: int = 0,
        queues: Collection[str] = (),
    ) -> Written:
        """Publish lots (number -> rows in it) as the whole batch or one part of it, all or nothing, and once."""
        self._check_open()
        return await self._run(
            lambda again: staging.publish_lots(
                self.dialect,
                batch,
                lots,
                part=part,
                given=given,
                copies=copies,
                queues=queues,
                now=self._now(),
                dedupe_for=micros(self._options.dedupe_for, "dedupe_for"),
                notify=self._options.notify,
            ),
            Mode.WRITE,
        )

    async def collect(self, batch: Batch) -> int:
        """Delete what a writer has staged up to this batch: of no use once it is published or given up."""
        return await self._until_none(lambda: staging.collect(self.dialect, batch))

    async def collect_orphans(self) -> int:
        """Delete staged lots that nobody will publish, and forget writers that have been silent for long."""
        await self._run(lambda again: staging.forget_writers(self.dialect, self._now()), Mode.WRITE)
        return await self._until_none(lambda: staging.collect_orphans(self.dialect, self._now()))

    async def _until_none(self, steps: Callable[[], Steps[int]]) -> int:
        """In small transactions."""
        self._check_open()
        total = 0
        while count := await self._run(lambda again: steps(), Mode.WRITE):
            total += count
        return total
