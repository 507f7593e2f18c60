"""The testing kit: a pond in memory, a clock that tests advance, handlers that run until nothing is due."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import AbstractAsyncContextManager, contextmanager
from datetime import datetime
from typing import TYPE_CHECKING, Any
from uuid import UUID

import msgspec

from millpond.clock import SECOND, ManualClock, Seconds, as_datetime, seconds
from millpond.codec import CONTENT_TYPE, decode, encode
from millpond.connections import LoopConnections
from millpond.errors import BodyNotEncodable
from millpond.loop import LoopThread
from millpond.message import SETTLED, State
from millpond.seam.operations import Row
from millpond.seam.transport import Transport
from millpond.telemetry import Telemetry
from millpond.transports.url import Url
from millpond.worker import Delivery, current_delivery
from millpond.worker.worker import Worker

if TYPE_CHECKING:
    from millpond.pond import Millpond

_PAGE = 1_000


class TestConnections(LoopConnections):
    """Connections of a pond under test, which stay open until the test ends: the program under test may close its pond.

    A thread waits for the test's event loop only in a handler. Elsewhere that loop may be blocked, by a synchronous
    test client that waits for this very thread.
    """

    __test__ = False  # pytest would collect it because of its name

    def __init__(self, url: Url, options: Mapping[str, Any], telemetry: Telemetry) -> None:
        super().__init__(url, options, telemetry)
        self.url = url
        self._loop = asyncio.get_running_loop()

    def _may_wait_for(self, loop: asyncio.AbstractEventLoop) -> bool:
        return current_delivery() is not None

    async def close(self) -> None:
        await self.disconnect()

    async def disconnect(self) -> None:
        if asyncio.get_running_loop() is not self._loop:
            await self._close_transport()

    def close_sync(self) -> None:
        """Without effect."""

    async def end(self) -> None:
        self._closed = True
        await super().disconnect()
        self._in_memory.clear()


class PublishedMessage(msgspec.Struct, frozen=True, kw_only=True):
    """A message as its publisher gave it."""

    id: UUID
    body: Any
    key: str | None
    priority: int
    delay: float
    """Seconds from publishing until it is due; after a retry, until the retry."""
    headers: dict[str, Any]
    """Without the content type."""
    state: State

    def matches(self, fields: Mapping[str, Any]) -> bool:
        for name, value in fields.items():
            if name not in self.__struct_fields__:
                raise TypeError(f"there is no field {name!r}; there are {', '.join(self.__struct_fields__)}")
            if name == "headers":
                if not value.items() <= self.headers.items():
                    return False
            elif (seconds(value) if name == "delay" else value) != getattr(self, name):
                return False
        return True


class TestPond:
    """The result of `pond.testing()`: `run` and `advance`, and reads of messages and bodies."""

    __test__ = False

    def __init__(self, pond: Millpond, transport: Transport, clock: ManualClock, *, raise_errors: bool) -> None:
        self._pond = pond
        self._transport = transport
        self._raise_errors = raise_errors
        self.clock = clock

    async def run(self, *queues: str) -> int:
        """Run the handlers until nothing is due; returns the number of deliveries.

        An error of a handler, or a body that cannot be decoded, ends the run and is raised after its outcome was
        written, unless the test began with `raise_errors=False`. `NackMessage` and `RejectMessage` are no errors.
        """
        errors: list[BaseException] = []

        def stop_at(delivery: Delivery, error: BaseException) -> None:
            where = f"on message {delivery.id} of {delivery.queue!r}, attempt {delivery.attempt}"
            error.add_note(f"{where}; pond.testing(raise_errors=False) leaves it to the retry policy")
            errors.append(error)
            if len(errors) == 1:
                worker.stop()

        worker = Worker(
            self._pond.of_queues(queues or None),
            until_idle=True,
            telemetry=self._pond.telemetry,
            redact=self._pond.redacted,
            on_error=stop_at if self._raise_errors else None,
            middleware=self._pond.handler_middleware,
            periodics=self._pond.periodics,
        )
        await worker.run(self._transport)
        if errors:
            raise errors[0]
        return worker.deliveries

    def advance(self, seconds: Seconds) -> None:
        """Advance the clock; the next `run` handles messages that became due."""
        self.clock.advance(seconds)

    @property
    def now(self) -> datetime:
        return as_datetime(self.clock.now())

    async def messages(self, queue: str, state: State | str | None = None) -> list[Row]:
        """The messages of a queue, live and settled, oldest first."""
        states = set(State) if state is None else {State(state)}
        operations, rows = self._transport.operations, []
        if live := states.difference(SETTLED):
            rows += await _all_pages(operations.browse, queue, list(live))
        if settled := states.intersection(SETTLED):
            rows += await _all_pages(operations.archived, queue, list(settled))
        return sorted(rows, key=lambda row: (row.created_us, row.id))

    async def published(self, queue: str) -> list[PublishedMessage]:
        """The messages that were published to a queue, oldest first, in any state."""
        return [
            PublishedMessage(
                id=row.id,
                body=decode(row.payload, row.headers.get(CONTENT_TYPE)),
                key=row.key,
                priority=row.priority,
                delay=(row.due_us - row.created_us) / SECOND,
                headers={name: value for name, value in row.headers.items() if name != CONTENT_TYPE},
                state=row.state,
            )
            for row in await self.messages(queue)
        ]

    async def assert_published(self, queue: str, body: Any, *, times: int = 1, **fields: Any) -> None:
        """Fail unless the body was published to the queue this number of times, with these fields.

        The body is plain, or of a type that `publish` takes, such as a dataclass. Fields: those of `PublishedMessage`,
        such as `key`, `delay` and `headers`. Given headers may be a part of them.
        """
        there = await self.published(queue)
        plain = _plain(body)
        found = [message for message in there if message.body in (body, plain) and message.matches(fields)]
        if len(found) != times:
            wanted = ", ".join([repr(body), *(f"{name}={value!r}" for name, value in fields.items())])
            shown = "\n  ".join(map(repr, there)) or "nothing"
            count = f"published to {queue!r} {len(found)} times, not {times}"
            raise AssertionError(f"{count}: {wanted}; there is\n  {shown}")

    async def bodies(self, queue: str, state: State | str | None = None) -> list[Any]:
        """The bodies of a queue's messages, as plain values."""
        return [decode(row.payload, row.headers.get(CONTENT_TYPE)) for row in await self.messages(queue, state)]


def _plain(body: Any) -> Any:
    """The body as a reader has it. A value that is only compared, such as `unittest.mock.ANY`, stays as it is."""
    try:
        return decode(*encode(body))
    except BodyNotEncodable:
        return body


async def _all_pages(page: Callable[..., Awaitable[list[Row]]], queue: str, states: list[State]) -> list[Row]:
    rows = found = await page(queue, states=states, limit=_PAGE)
    while len(found) == _PAGE:
        found = await page(queue, states=states, limit=_PAGE, after=found[-1].position)
        rows = rows + found
    return rows


class SyncTestPond:
    """A `TestPond` for synchronous tests."""

    __test__ = False

    def __init__(self, test: TestPond, thread: LoopThread) -> None:
        self._test = test
        self._thread = thread
        self.clock = test.clock

    def run(self, *queues: str) -> int:
        """Run the handlers until nothing is due; raises their errors as `TestPond.run` does."""
        return self._thread.wait_for(self._test.run(*queues))

    def advance(self, seconds: Seconds) -> None:
        self._test.advance(seconds)

    @property
    def now(self) -> datetime:
        return self._test.now

    def messages(self, queue: str, state: State | str | None = None) -> list[Row]:
        return self._thread.wait_for(self._test.messages(queue, state))

    def bodies(self, queue: str, state: State | str | None = None) -> list[Any]:
        return self._thread.wait_for(self._test.bodies(queue, state))

    def published(self, queue: str) -> list[PublishedMessage]:
        return self._thread.wait_for(self._test.published(queue))

    def assert_published(self, queue: str, body: Any, *, times: int = 1, **fields: Any) -> None:
        self._thread.wait_for(self._test.assert_published(queue, body, times=times, **fields))


@contextmanager
def testing_sync(testing: AbstractAsyncContextManager[TestPond]) -> Iterator[SyncTestPond]:
    """The kit in its own event loop, in a thread."""
    thread = LoopThread()
    try:
        test = thread.wait_for(_entered(testing))
        try:
            yield SyncTestPond(test, thread)
        finally:
            thread.wait_for(_left(testing))
    finally:
        thread.end()


async def _entered(testing: AbstractAsyncContextManager[TestPond]) -> TestPond:
    return await testing.__aenter__()


async def _left(testing: AbstractAsyncContextManager[TestPond]) -> None:
    await testing.__aexit__(None, None, None)
