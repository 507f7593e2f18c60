"""What an operator may ask of a store. The command line, and whatever else people look through, is a face of this."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from datetime import datetime
from typing import Any, Protocol, cast
from uuid import UUID

import msgspec

from millpond import codec
from millpond.clock import Seconds
from millpond.errors import BodyNotDecodable, not_supported
from millpond.message import LIVE, SETTLED, State, replayed_id
from millpond.transport import Capability, QueueStats, Row, Store, Streams, StreamStatus, Transport

RETRY = "retry"
"""The name under which `retry` replays: the same each time, so that retrying twice is harmless."""

_PAGE = 1000


class Retried(msgspec.Struct, frozen=True, kw_only=True):
    """What came of a retry."""

    published: list[UUID]
    """The new ids of FAILED messages that were published again."""
    hastened: list[UUID]
    """RETRYABLE messages that are due now."""
    before: list[UUID]
    """FAILED messages that an earlier retry has published again already."""
    left: Mapping[UUID, str]
    """Those that were left alone, and why."""


class HasDeadLetters(Protocol):
    """A transport that keeps FAILED messages, and cannot browse the others."""

    def dead_letters(self) -> Store: ...


class Control:
    """The operator's verbs over one store."""

    def __init__(self, transport: Transport) -> None:
        needed = Capability.BROWSE | Capability.ARCHIVE
        if needed in transport.capabilities and isinstance(transport, Store):
            self.store = transport
        elif Capability.DEAD_LETTERS in transport.capabilities:
            # FAILED messages are all that it shows; whatever else is asked says what it lacks.
            self.store = cast(HasDeadLetters, transport).dead_letters()
        else:
            raise not_supported("looking after a queue", needed & ~transport.capabilities)

    # --- look ---------------------------------------------------------------------------------------

    async def counts(self, queues: Sequence[str] = (), *, exact: bool = False) -> list[QueueStats]:
        """Messages per queue and state: of these queues, or of all that there are."""
        return await self.store.count(queues or None, exact=exact)

    async def messages(self, queue: str | None = None, *, states: Sequence[State] = (), limit: int = 100) -> list[Row]:
        """Live messages in the order of claims, then archived ones, newest first."""
        wanted = states or [*LIVE, *SETTLED]
        rows: list[Row] = []
        if live := [state for state in wanted if state in LIVE]:
            rows = list(await self.store.browse(queue, states=live, limit=limit))
        if len(rows) < limit and (settled := [state for state in wanted if state in SETTLED]):
            rows += await self.store.archived(queue, states=settled, limit=limit - len(rows))
        return rows

    async def find(self, ids: Sequence[UUID]) -> list[Row]:
        return await self.store.find(ids)

    # --- again --------------------------------------------------------------------------------------

    async def retry(self, ids: Sequence[UUID]) -> Retried:
        """FAILED messages are published again, RETRYABLE ones become due now; others are left alone."""
        rows: dict[UUID, Row] = {}
        for row in await self.store.find(ids):
            rows.setdefault(row.id, row)  # live first
        published, before = await self._publish_again([row for row in rows.values() if row.state is State.FAILED])
        waiting = [row.id for row in rows.values() if row.state is State.RETRYABLE]
        hastened = list(await self.store.reschedule(waiting, delay=0)) if waiting else []
        left = {id_: "there is no such message" for id_ in ids if id_ not in rows}
        for row in rows.values():
            if row.state is not State.FAILED and row.id not in hastened:
                left[row.id] = "it was claimed meanwhile" if row.id in waiting else f"it is {row.state}"
        return Retried(published=published, hastened=hastened, before=before, left=left)

    async def retry_queue(self, queue: str, *, reason: str | None = None) -> Retried:
        """All FAILED messages of a queue, or those with this reason."""
        published: list[UUID] = []
        before: list[UUID] = []
        async for rows in self._archived(queue, [State.FAILED]):
            page = [row for row in rows if reason is None or row.reason == reason]
            new, old = await self._publish_again(page)
            published += new
            before += old
        return Retried(published=published, hastened=[], before=before, left={})

    async def replay(self, ids: Sequence[UUID], *, name: str, queue: str | None = None) -> list[UUID]:
        """Publish archived messages again; returns the new ids of those that this replay had not published yet."""
        return [p.id for p in await self.store.replay(ids, name=name, queue=queue) if p.new]

    async def replay_queue(
        self,
        queue: str,
        *,
        name: str,
        states: Sequence[State] = (),
        since: datetime | None = None,
        until: datetime | None = None,
        to: str | None = None,
    ) -> list[UUID]:
        published: list[UUID] = []
        async for rows in self._archived(queue, list(states) or list(SETTLED), since=since, until=until):
            published += await self.replay([row.id for row in rows], name=name, queue=to)
        return published

    # --- change -------------------------------------------------------------------------------------

    async def reschedule(
        self,
        ids: Sequence[UUID],
        *,
        priority: int | None = None,
        due_at: datetime | None = None,
        delay: Seconds | None = None,
        attempts: int | None = None,
    ) -> list[UUID]:
        return await self.store.reschedule(ids, priority=priority, due_at=due_at, delay=delay, attempts=attempts)

    async def cancel(self, ids: Sequence[UUID], *, reason: str = "cancelled") -> list[UUID]:
        return await self.store.cancel(ids, reason=reason)

    async def pause(self, queue: str) -> None:
        await self.store.pause(queue)

    async def resume(self, queue: str) -> None:
        await self.store.resume(queue)

    async def retain(self, queue: str, *, completed: Seconds | None = None, failed: Seconds | None = None) -> None:
        """How long a queue's archive is kept; None: for ever."""
        await self.store.retain(queue, completed=completed, failed=failed)

    async def purge(
        self, queue: str | None = None, *, older_than: Seconds | None = None, states: Sequence[State] = ()
    ) -> int:
        return await self.store.purge(queue, older_than=older_than, states=states or None)

    # --- streams ------------------------------------------------------------------------------------

    async def streams(self) -> list[StreamStatus]:
        """The Spark queries that consume queues of this database, and what they hold."""
        return await self._streams().streams()

    async def release_stream(self, name: str) -> int:
        """Give back what a stream holds, and fence out whoever drives it; returns how many messages."""
        return await self._streams().release_stream(name)

    # --- inside -------------------------------------------------------------------------------------

    def _streams(self) -> Streams:
        if Capability.STREAMS not in self.store.capabilities:
            raise not_supported("a stream", Capability.STREAMS)
        store: Any = self.store
        return cast("Streams", store)

    async def _publish_again(self, failed: Sequence[Row]) -> tuple[list[UUID], list[UUID]]:
        """(new ids, old ids that were retried before)

        The dedupe window forgets; the archive does not, so that a message is retried once and no more.
        """
        by_new_id = {replayed_id(row.id, RETRY): row.id for row in failed}
        known = {row.id for row in await self.store.find(list(by_new_id))} if by_new_id else set()
        fresh = [old for new, old in by_new_id.items() if new not in known]
        published = [p.id for p in await self.store.replay(fresh, name=RETRY) if p.new] if fresh else []
        return published, [old for new, old in by_new_id.items() if new not in published]

    async def _archived(
        self,
        queue: str,
        states: Sequence[State],
        *,
        since: datetime | None = None,
        until: datetime | None = None,
    ) -> AsyncIterator[list[Row]]:
        after: Sequence[Any] | None = None
        while True:
            rows = await self.store.archived(queue, states=states, since=since, until=until, limit=_PAGE, after=after)
            if rows:
                yield rows
            if len(rows) < _PAGE:
                return
            after = rows[-1].position


def facts(row: Row) -> dict[str, Any]:
    """A message as JSON values; what is not known is left out."""
    times = [name for name in Row.__struct_fields__ if name.endswith("_us")]
    values: dict[str, Any] = {
        "id": str(row.id),
        "queue": row.queue,
        "key": row.key,
        "priority": row.priority,
        "state": row.state.value,
        "deliveries": row.deliveries,
        "attempts": row.attempts,
        **{f"{name[:-3]}_at": _moment(getattr(row, f"{name[:-3]}_at")) for name in times},
        "reason": row.reason,
        "error": row.error,
        "headers": dict(row.headers) or None,
    }
    return {name: value for name, value in values.items() if value is not None} | {"body": body(row)}


def body(row: Row) -> Any:
    """The body as JSON values: bytes that are neither JSON nor text as {"base64": …}."""
    content_type = row.headers.get(codec.CONTENT_TYPE)
    try:
        value = codec.decode(row.payload, content_type)
    except BodyNotDecodable:
        value = row.payload
    return msgspec.to_builtins({"base64": value}) if isinstance(value, bytes) else value


def _moment(value: datetime | None) -> str | None:
    return None if value is None else value.isoformat().replace("+00:00", "Z")
