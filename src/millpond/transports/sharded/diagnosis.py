"""Diagnosis over shards: the shard that has the message answers, and missing shards are named."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from statistics import median
from uuid import UUID

import msgspec

from millpond.clock import monotonic
from millpond.errors import ShardUnavailable
from millpond.message import LIVE, check_id
from millpond.seam.diagnosis import Circumstances, Finding, ShardHealth
from millpond.transports.sharded.members import Members
from millpond.transports.sharded.shard import ANSWER_WITHIN, Shard

_HOT, _FEW = 4, 1000
"""A shard is hot from this multiple of the median of the others on, if it has at least this many live messages."""
_SLOW, _QUICK = 10, 0.25
"""A shard is slow from this multiple of the median of the others on, if its answer took at least this many seconds."""


class ShardedDiagnosis:
    def __init__(self, members: Members) -> None:
        self._members = members

    async def circumstances(self, id: UUID) -> Circumstances:
        wanted = check_id(id)
        answers = await self._members.ask(lambda store: store.diagnosis.circumstances(wanted))
        # A live message before an archived one, and that before none.
        best = min(answers, key=lambda facts: 2 if facts.row is None else facts.row.archived_us is not None)
        remembered = any(facts.remembered for facts in answers)
        return msgspec.structs.replace(best, remembered=remembered, missing=self._members.missing)

    async def shards(self) -> list[ShardHealth]:
        return list(await asyncio.gather(*map(self._shard, self._members.shards)))

    async def _shard(self, shard: Shard) -> ShardHealth:
        ranges = tuple(self._members.map.ranges_of(shard.name))
        started = monotonic()
        try:
            counted = await shard.call(lambda store: store.operations.count(), within=ANSWER_WITHIN)
        except ShardUnavailable:
            return ShardHealth(name=shard.name, key_ranges=ranges, answers=False)
        live = sum(stats.counts.get(state, 0) for stats in counted for state in LIVE)
        return ShardHealth(name=shard.name, key_ranges=ranges, answers=True, seconds=monotonic() - started, live=live)

    async def examine(self) -> list[Finding]:
        found = [
            finding for part in await self._members.ask(lambda store: store.diagnosis.examine()) for finding in part
        ]
        found += (
            Finding(
                kind="missing-shard",
                severity="error",
                text=f"the shard {name!r} does not answer: its messages wait",
                remedy="start its database, or look at the network to it",
            )
            for name in self._members.missing
        )
        found += (
            Finding(
                kind="refused-claims",
                severity="error",
                text=f"the shard {shard.name!r} refuses claims, and its messages wait: {shard.claim_error}",
                remedy="remove the cause; claims are tried again every few seconds",
            )
            for shard in self._members.shards
            if shard.claim_error is not None
        )
        return found + uneven(await self.shards())


def uneven(shards: Sequence[ShardHealth]) -> list[Finding]:
    """Shards with far more messages than the others, or far slower answers."""
    found: list[Finding] = []
    for one in shards:
        others = [other for other in shards if other is not one and other.answers]
        if not one.answers or not others:
            continue
        live, seconds = one.live or 0, one.seconds or 0.0
        usual = median(other.live or 0 for other in others)
        if live >= max(_FEW, _HOT * usual):
            found.append(
                Finding(
                    kind="hot-shard",
                    severity="warning",
                    text=f"the shard {one.name!r} has {live:,} live messages, the others about {usual:,.0f}",
                    remedy="look for a key with many messages; give more workers to this shard (millpond run --shards)",
                )
            )
        quick = median(other.seconds or 0.0 for other in others)
        if seconds >= max(_QUICK, _SLOW * quick):
            found.append(
                Finding(
                    kind="slow-shard",
                    severity="warning",
                    text=f"the shard {one.name!r} answered in {seconds:.2f} s, the others in about {quick:.2f} s",
                    remedy="look at the load of its database and the network to it",
                )
            )
    return found
