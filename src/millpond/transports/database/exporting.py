"""The verbs of exports on a store: what the driver of an export asks of each database."""

from __future__ import annotations

import asyncio

from millpond.clock import as_datetime, monotonic
from millpond.errors import StoreError
from millpond.transports.database import exports
from millpond.transports.database.engine import Mode
from millpond.transports.database.exports import NOTHING, Closed, Export
from millpond.transports.database.running import Running

PATIENCE = 5.0
"""Seconds to wait for transactions to end before an export goes on with what was archived before them."""
_LOOK_AGAIN = 0.05


class ExportVerbs(Running):
    """Every verb may be repeated after a lost connection."""

    async def open_export(self, lake: str, *, shard: int, path: str, until: int | None) -> None:
        self._check_open()
        await self._run(
            lambda again: exports.open_export(self.dialect, lake, shard=shard, path=path, until=until, now=self._now()),
            Mode.WRITE,
        )

    async def close_archive(self, since: int | None) -> Closed:
        """A moment, mostly now, before which nothing will be archived any more. `since` was closed before.

        What was settled before the call lies before the moment, unless a transaction that is still open holds it back.
        """
        self._check_open()
        await asyncio.sleep(self.dialect.tick)
        at = await self._run(lambda again: exports.moment(self.dialect, self._now()), Mode.WRITE)
        if since is not None and at < since:
            raise StoreError(
                f"the clock of the database at {self.url} was set back, to before {as_datetime(since)}, up to when it "
                "was exported: what it archives until then is taken for exported. Purge nothing; export to a new lake"
            )
        if self.dialect.sole_writer:
            return Closed(at)
        await asyncio.sleep(self.dialect.grace)
        give_up_at = monotonic() + PATIENCE
        held = await self._late(since, at)
        while held and monotonic() < give_up_at:
            await asyncio.sleep(_LOOK_AGAIN)
            now = await self._late(since, at)
            # Whoever was not there at the first look has begun after the moment.
            held = {who: now[who] for who in held if who in now}
        return Closed(min((at, *held.values())), held=bool(held))

    async def _late(self, since: int | None, at: int) -> dict[str, int]:
        low = NOTHING if since is None else since
        return await self._run(lambda again: self.dialect.late(low, at), Mode.READ)

    async def note_export(self, lake: str, until: int) -> None:
        self._check_open()
        await self._run(lambda again: exports.note_export(self.dialect, lake, until, self._now()), Mode.WRITE)

    async def exports(self) -> list[Export]:
        """The lakes that this archive is exported to."""
        self._check_open()
        return await self._run(lambda again: exports.exports(self.dialect), Mode.READ)

    async def forget_export(self, lake: str) -> bool:
        """Purge no longer waits for this lake; says whether it was known."""
        self._check_open()
        return await self._run(lambda again: exports.forget_export(self.dialect, lake), Mode.WRITE)
