"""The testing kit: a pond on memory, a clock that tests move, handlers run until nothing is due."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Any, cast

from millpond.clock import ManualClock, Seconds, as_datetime
from millpond.codec import CONTENT_TYPE, decode
from millpond.message import State
from millpond.transport import Row, Store, Transport
from millpond.worker import Worker

if TYPE_CHECKING:
    from millpond.pond import Millpond


class TestPond:
    """What `pond.testing()` gives: `run`, `advance`, and what became of the messages."""

    __test__ = False  # not a test class, whatever its name says to pytest

    def __init__(self, pond: Millpond, transport: Transport, clock: ManualClock) -> None:
        self._pond = pond
        self._transport = cast(Store, transport)
        self.clock = clock

    async def run(self, *queues: str) -> int:
        """Run the handlers until nothing is due; returns how many deliveries there were."""
        pond = self._pond
        worker = Worker(pond.of_queues(queues or None), until_idle=True, telemetry=pond.telemetry)
        await worker.run(self._transport)
        return worker.deliveries

    def advance(self, seconds: Seconds) -> None:
        """Move the clock; what falls due by that is run by the next `run`."""
        self.clock.advance(seconds)

    @property
    def now(self) -> datetime:
        return as_datetime(self.clock.now())

    async def messages(self, queue: str, state: State | str | None = None) -> list[Row]:
        """The messages of a queue, live and settled, oldest first."""
        states: Sequence[State] | None = None if state is None else [State(state)]
        live = [] if states and states[0] in (State.COMPLETED, State.FAILED) else await self._live(queue, states)
        done = [] if states and states[0] not in (State.COMPLETED, State.FAILED) else await self._settled(queue, states)
        return sorted([*live, *done], key=lambda row: (row.created_us, row.id))

    async def bodies(self, queue: str, state: State | str | None = None) -> list[Any]:
        """The bodies of a queue's messages, as plain values."""
        return [decode(row.payload, row.headers.get(CONTENT_TYPE)) for row in await self.messages(queue, state)]

    async def _live(self, queue: str, states: Sequence[State] | None) -> list[Row]:
        return await self._transport.browse(queue, states=states, limit=1_000)

    async def _settled(self, queue: str, states: Sequence[State] | None) -> list[Row]:
        return await self._transport.archived(queue, states=states, limit=1_000)
