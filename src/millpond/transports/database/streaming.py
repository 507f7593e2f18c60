"""The verbs of streams on a store."""

from __future__ import annotations

from collections.abc import Sequence
from typing import get_args
from uuid import UUID

from millpond.errors import InvalidOption
from millpond.message import check_id, check_name
from millpond.outcome import MAX_CRASHES
from millpond.transport import Recorded, Settlement, StreamClaim, StreamStatus, Waiting
from millpond.transports.arguments import queue_names, whole_number
from millpond.transports.database import stream_claims, streams
from millpond.transports.database.claim import Lanes
from millpond.transports.database.engine import Mode
from millpond.transports.database.running import Running
from millpond.transports.database.stream_claims import Request

_MOST_OUTCOMES = 10_000
"""To a transaction."""


class StreamVerbs(Running):
    """What a Spark query asks of a store. Every verb may be repeated after a lost connection."""

    _lanes: dict[str, Lanes]

    def _drop_floors(self) -> None:
        """Messages may be due below where the last claims ended."""
        raise NotImplementedError

    async def open_stream(self, name: str, *, epoch: int | None = None, above: int = 0) -> tuple[int, int]:
        self._check_open()
        label = check_name(name, "stream")
        return await self._run(
            lambda again: streams.open_stream(self.dialect, label, epoch, above, now=self._now(), again=again),
            Mode.WRITE,
        )

    async def claim_for_stream(
        self,
        name: str,
        epoch: int,
        seq: int,
        queues: Sequence[str],
        limit: int,
        *,
        slices: int = 1,
        until_us: int | None = None,
        max_crashes: int | None = MAX_CRASHES,
    ) -> StreamClaim | None:
        self._check_open()
        names = queue_names(queues)
        whole_number(limit, "limit")
        if not names:
            raise InvalidOption("a stream needs a queue")
        wanted = Request(names, limit, slices, until_us, max_crashes)
        while True:
            made = await self._run(
                lambda again: stream_claims.claim(self.dialect, self._lanes, name, epoch, seq, wanted, now=self._now()),
                Mode.WRITE,
            )
            if made.claim is not None or not made.refused:
                return made.claim

    async def stream_claim(self, name: str, epoch: int, seq: int) -> StreamClaim | None:
        self._check_open()
        return await self._run(lambda again: streams.recorded(self.dialect, name, epoch, seq), Mode.READ)

    async def ack_stream(
        self, name: str, epoch: int, seq: int, *, unsettled: Settlement = "ack", messages: int | None = None
    ) -> None:
        self._check_open()
        await self._run(
            lambda again: streams.ack(
                self.dialect, name, epoch, seq, unsettled=unsettled, messages=messages, now=self._now()
            ),
            Mode.WRITE,
        )

    async def record_outcomes(self, name: str, outcomes: Sequence[Recorded]) -> list[UUID]:
        self._check_open()
        for outcome in outcomes:
            check_id(outcome.id)
            if outcome.outcome not in get_args(Settlement):
                raise InvalidOption(f"an outcome is ack, nack or reject, not {outcome.outcome!r}")
        unknown: set[UUID] = set()
        for start in range(0, len(outcomes), _MOST_OUTCOMES):
            some = outcomes[start : start + _MOST_OUTCOMES]
            unknown |= await self._run(
                lambda again, some=some: streams.record_outcomes(self.dialect, name, some),  # type: ignore[misc]
                Mode.WRITE,
            )
        return [id_ for id_ in dict.fromkeys(o.id for o in outcomes) if id_ in unknown]

    async def release_stream(self, name: str) -> int:
        self._check_open()
        count = await self._run(lambda again: streams.release(self.dialect, name), Mode.WRITE)
        self._drop_floors()
        return count

    async def streams(self) -> list[StreamStatus]:
        self._check_open()
        return await self._run(lambda again: streams.status(self.dialect, self._now()), Mode.READ)

    async def waiting(self, queues: Sequence[str], limit: int = 100_000) -> Waiting:
        self._check_open()
        names = queue_names(queues)
        whole_number(limit, "limit")
        return await self._run(
            lambda again: stream_claims.waiting(self.dialect, self._lanes, names, limit, self._now()), Mode.READ
        )
