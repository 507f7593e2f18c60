"""Group commit: messages that are published one by one at the same time share a transaction.

One write is in flight, and the next one takes all messages that wait. A message that finds no write in flight is
written at once, so a single publisher waits no longer than without groups.
"""

from __future__ import annotations

import asyncio
import copy
from collections import deque
from collections.abc import Awaitable, Callable, Sequence

from millpond.errors import (
    AuthenticationFailed,
    Closed,
    EncryptionFailed,
    NotMigrated,
    ShardMapChanged,
    ShardMapMismatch,
    StoreBusy,
    StoreUnavailable,
    UnknownDatabase,
)
from millpond.message import Draft, Published

GROUP_MESSAGES = 1_000
GROUP_BYTES = 1 << 20
"""Maximum size of a group's bodies and headers. A single message may be larger."""
_OVERTAKEN = 0.1
"""Seconds after which a write that still waits, for a lock or a connection, holds back the next group no longer."""
_OF_ALL = (
    AuthenticationFailed,
    Closed,
    EncryptionFailed,
    NotMigrated,
    ShardMapChanged,
    ShardMapMismatch,
    StoreBusy,
    StoreUnavailable,
    UnknownDatabase,
)
"""Errors of the database, not of a message. Writing the messages one by one would only repeat them."""


class Tries:
    """The tries to write some messages: their marks, and whether the reply of one was lost."""

    def __init__(self, marks: Sequence[int] = (), *, lost: bool = False) -> None:
        self.marks = list(marks)
        self.lost = lost

    def on_lost(self) -> None:
        self.lost = True

    def of_part(self) -> Tries:
        """For a part of the same messages, which an earlier try may have committed."""
        return Tries(self.marks if self.lost else (), lost=self.lost)


Write = Callable[[Sequence[Draft], Tries], Awaitable[list[Published]]]


_Entry = tuple[Draft, asyncio.Future[Published]]
"""A message that waits, and the result for its caller."""


class PublishGroups:
    """The groups of one handle: messages in the order of their calls.

    Only for generated ids. An id that a caller gave may have to wait for another transaction that publishes the same
    id, and its neighbours in a group would wait with it.
    """

    def __init__(self, write: Write) -> None:
        self._write = write
        self._waiting: deque[_Entry] = deque()
        self._current: object | None = None
        """The write that holds back the next group."""
        self._writes = 0
        self._tasks: set[asyncio.Task[None]] = set()
        self._overtaking: asyncio.TimerHandle | None = None
        self._flushed: asyncio.Event | None = None
        """Set when no write is in flight and none waits; only while a caller waits for that."""

    async def publish(self, draft: Draft) -> Published:
        if self._current is None:
            # In the caller's own task: its cancellation can end this write, because the message is alone.
            current = self._begin()
            try:
                return (await self._write([draft], Tries()))[0]
            finally:
                self._end(current)
        loop = asyncio.get_running_loop()
        if not self._waiting:
            self._overtaking = loop.call_later(_OVERTAKEN, self._write_next)
        result: asyncio.Future[Published] = loop.create_future()
        self._waiting.append((draft, result))
        return await result

    async def flush(self) -> None:
        """Return when every message that was accepted is written or refused."""
        if self._writes:
            self._flushed = self._flushed or asyncio.Event()
            await self._flushed.wait()

    def _begin(self) -> object:
        self._current = current = object()
        self._writes += 1
        return current

    def _end(self, current: object) -> None:
        self._writes -= 1
        if self._current is current:
            self._current = None
            if self._waiting:
                self._write_next()
        if self._flushed is not None and not self._writes:
            self._flushed.set()
            self._flushed = None

    def _write_next(self) -> None:
        """Write the messages that wait, in a separate task: no caller's cancellation ends it."""
        if self._overtaking is not None:
            self._overtaking.cancel()
            self._overtaking = None
        group = self._take()
        if group:
            task = asyncio.get_running_loop().create_task(self._write_group(group, self._begin()))
            self._tasks.add(task)  # an event loop keeps only weak references
            task.add_done_callback(self._tasks.discard)
        if self._waiting:
            self._overtaking = asyncio.get_running_loop().call_later(_OVERTAKEN, self._write_next)

    def _take(self) -> list[_Entry]:
        """The next group. Messages of cancelled callers are dropped: nothing of them was sent."""
        group: list[_Entry] = []
        size = 0
        waiting = self._waiting
        while waiting and len(group) < GROUP_MESSAGES:
            draft, result = entry = waiting.popleft()
            if result.done():
                continue
            size += len(draft.payload)
            if draft.headers is not None:
                size += len(draft.headers)
            if size > GROUP_BYTES and group:
                waiting.appendleft(entry)
                break
            group.append(entry)
        return group

    async def _write_group(self, group: Sequence[_Entry], current: object) -> None:
        try:
            await self._write_split(group, Tries())
            # Let the callers go on: those that publish again at once belong to the next group. Without this, groups of
            # all publishers alternate with groups of one.
            await asyncio.sleep(0)
        finally:
            for _, result in group:  # the event loop ends
                result.cancel()
            self._end(current)

    async def _write_split(self, group: Sequence[_Entry], tries: Tries) -> None:
        """Write the group, or halves of it if that fails: each caller gets the error of its own message."""
        try:
            results = await self._write([draft for draft, _ in group], tries)
        except Exception as e:
            if len(group) == 1:
                _fail(group[0], e)
            elif isinstance(e, _OF_ALL):
                for entry in group:
                    own = copy.copy(e)  # each caller adds its own traceback
                    own.__cause__ = e.__cause__
                    _fail(entry, own)
            else:
                middle = len(group) // 2
                await self._write_split(group[:middle], tries.of_part())
                await self._write_split(group[middle:], tries.of_part())
            return
        for (_, result), published in zip(group, results, strict=True):
            if not result.done():
                result.set_result(published)


def _fail(entry: _Entry, error: Exception) -> None:
    _, result = entry
    if not result.done():
        result.set_exception(error)
