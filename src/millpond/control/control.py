"""Compound operator verbs. The command line and the server are faces of this."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from datetime import datetime
from typing import Any
from uuid import UUID

import msgspec

from millpond.checks import unknown_option
from millpond.clock import SECOND, Seconds, seconds
from millpond.control import doctor
from millpond.control.bounded_reads import find_pages, most_after, pages, without_body
from millpond.control.lag import StreamView, with_lag
from millpond.control.search import BYTES_OF_PAGE, Choice, Page, Preview, Search
from millpond.control.why import Why, explain
from millpond.errors import InvalidOption, UnknownQueue
from millpond.message import LIVE, RETRY, SETTLED, State, replayed_id
from millpond.seam.access import Access
from millpond.seam.diagnosis import Finding, ShardHealth
from millpond.seam.operations import QueueRates, QueueStats, Row
from millpond.seam.periodic import PeriodicMessages
from millpond.seam.streams import Streams
from millpond.seam.transport import Capability, Transport
from millpond.seam.workers import Workers

_PAGE = 1000


class Retried(msgspec.Struct, frozen=True, kw_only=True):
    """Result of a retry."""

    published: list[UUID]
    """New ids of the FAILED messages that were published again."""
    due_now: list[UUID]
    """RETRYABLE messages that are due now."""
    already_retried: list[UUID]
    """FAILED messages that an earlier retry published again."""
    skipped: Mapping[UUID, str]
    """Messages that were not changed, with the reason."""


class QueueView(msgspec.Struct, frozen=True, kw_only=True):
    """A queue as an operator sees it: counts, rates and the age of its oldest due message."""

    stats: QueueStats
    completed_per_second: float
    failed_per_second: float
    oldest_for: float | None
    """Seconds since the message that has waited longest was due; None while no message is due."""


class Control:
    """Operator verbs that need several calls. The single ones are `control.operations` and `control.streams`."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self.operations = transport.operations

    @property
    def periodic(self) -> PeriodicMessages:
        return self._transport.periodic

    @property
    def streams(self) -> Streams:
        return self._transport.streams

    @property
    def workers(self) -> Workers:
        return self._transport.workers

    @property
    def access(self) -> Access:
        return self._transport.access

    @property
    def capabilities(self) -> Capability:
        return self._transport.capabilities

    async def overview(self, queues: Sequence[str] | None = None, *, over: Seconds = 60) -> list[QueueView]:
        """Counts, rates over the last `over` seconds, and ages of queues."""
        counted = await self.operations.count(queues)
        window = seconds(over, "over")
        rates: dict[str, QueueRates] = {}
        if Capability.ARCHIVE in self.capabilities and counted:
            names = [stats.queue for stats in counted]
            rates = {rate.queue: rate for rate in await self.operations.rates(names, over=over)}
        views = []
        for stats in counted:
            rate = rates.get(stats.queue)
            views.append(
                QueueView(
                    stats=stats,
                    completed_per_second=0.0 if rate is None else rate.completed / window,
                    failed_per_second=0.0 if rate is None else rate.failed / window,
                    oldest_for=_age(stats, rate),
                )
            )
        return views

    async def message(self, id: UUID) -> Row | None:
        """One message with its failed attempts, live or archived; None if there is none."""
        found = await self.operations.find([id])
        return found[0] if found else None

    async def why(self, id: UUID, *, sees: Callable[[str], bool] = lambda queue: True) -> Why:
        """All reasons why a message does not run, the one to act on first at the beginning.

        `sees`: whether the texts may have errors of messages of a queue.
        """
        facts = await self._transport.diagnosis.circumstances(id)
        if facts.row is not None and not sees(facts.row.queue):
            facts = msgspec.structs.replace(facts, row=msgspec.structs.replace(facts.row, error=None))
        return explain(id, facts)

    async def shards(self) -> list[ShardHealth]:
        """The shards of a pond of several databases; none of one database."""
        return await self._transport.diagnosis.shards()

    async def doctor(self) -> list[Finding]:
        """Find faults around the queue; errors come first."""
        found = await self._transport.diagnosis.examine()
        found += doctor.of_queues(await self.operations.count())
        found += doctor.of_messages(await self._some_live(_PAGE))
        if Capability.PRESENCE in self.capabilities:
            found += doctor.of_workers(await self.workers.status())
        if Capability.STREAM_STATUS in self.capabilities:
            found += doctor.of_streams(await self.streams.status())
        return sorted(found, key=lambda finding: finding.severity)

    async def _some_live(self, most: int) -> list[Row]:
        """The first live messages, without bodies."""
        rows: list[Row] = []
        async for page in pages(lambda limit, after: self.operations.browse(limit=limit, after=after)):
            rows += map(without_body, page)
            if len(rows) >= most:
                break
        return rows

    async def worker_messages(self, worker: int, *, limit: int = 100) -> list[Row]:
        """Messages that a worker holds, up to a number and a size of bodies."""
        rows: list[Row] = []

        async def read(limit: int, after: Sequence[Any] | None) -> list[Row]:
            return await self.operations.browse(worker=worker, limit=limit, after=after)

        async for page in pages(read):
            rows += page
            if len(rows) >= limit or sum(len(row.payload) for row in rows) >= BYTES_OF_PAGE:
                break
        return rows[:limit]

    async def stream_views(self) -> list[StreamView]:
        """All streams, each with the number of due messages behind it and their age, as far as it is known."""
        return await with_lag(self.streams, self.operations)

    async def search(self, choice: Choice, *, limit: int = 100, cursor: str | None = None) -> Page:
        """A page of messages that match, and the cursor of the next one. It reads a bounded number of rows."""
        return await Search(self.operations, choice).page(limit, cursor)

    async def preview_retry(self, choice: Choice) -> Preview:
        """The number of FAILED messages that `retry_matching` would publish again, counted up to a limit."""
        return await Search(self.operations, choice.of_failed()).count(lambda row: not row.retried)

    async def preview(self, choice: Choice) -> Preview:
        """The number of messages that match, counted up to a limit."""
        return await Search(self.operations, choice).count()

    async def retry_matching(self, choice: Choice, *, rate: float | None = None, limit: int | None = None) -> Retried:
        """Publish FAILED messages that match again, at most `rate` per second and `limit` in all."""
        if rate is not None and not rate > 0:
            raise InvalidOption(f"rate must be above 0 messages per second, not {rate}")
        search = Search(self.operations, choice.of_failed())
        published: list[UUID] = []
        already: list[UUID] = []
        size = _PAGE if rate is None else max(1, min(_PAGE, round(rate)))
        async for rows in search.batches(size):
            if limit is not None:
                rows = rows[: max(0, limit - len(published))]
            new, old = await self._publish_again(rows)
            published += new
            already += old
            if limit is not None and len(published) >= limit:
                break
            if rate is not None and new:
                await asyncio.sleep(len(new) / rate)
        return Retried(published=published, due_now=[], already_retried=already, skipped={})

    async def check_queue(self, queue: str) -> None:
        """Raise `UnknownQueue` for a queue without messages and settings."""
        if (unknown := await self.unknown_queue(queue)) is not None:
            raise unknown

    async def unknown_queue(self, queue: str) -> UnknownQueue | None:
        """The error for a queue without messages and settings, with the most similar name. None: the queue exists."""
        if await self.operations.has_queue(queue):
            return None
        if Capability.BROWSE not in self._transport.capabilities:
            return UnknownQueue(f"there is no queue {queue!r}; check its name")
        known = [stats.queue for stats in await self.operations.count()]
        return UnknownQueue(unknown_option(queue, known, "there is no queue"))

    async def messages(self, queue: str | None = None, *, states: Sequence[State] = (), limit: int = 100) -> list[Row]:
        """Live messages in the order of claims, then archived ones, newest first."""
        wanted = states or [*LIVE, *SETTLED]
        rows: list[Row] = []
        if live := [state for state in wanted if state in LIVE]:
            rows = list(await self.operations.browse(queue, states=live, limit=limit))
        if len(rows) < limit and (settled := [state for state in wanted if state in SETTLED]):
            rows += await self.operations.archived(queue, states=settled, limit=limit - len(rows))
        return rows

    async def retry(self, ids: Sequence[UUID]) -> Retried:
        """FAILED messages are published again, RETRYABLE ones become due now; others are left alone."""
        result = Retried(published=[], due_now=[], already_retried=[], skipped={})
        skipped: dict[UUID, str] = {}
        async for some, found in find_pages(self.operations, ids):
            rows: dict[UUID, Row] = {}
            for row in found:
                rows.setdefault(row.id, row)  # live first
            new, old = await self._publish_again([row for row in rows.values() if row.state is State.FAILED])
            waiting = [row.id for row in rows.values() if row.state is State.RETRYABLE]
            due_now = list(await self.operations.reschedule(waiting, delay=0)) if waiting else []
            result.published.extend(new)
            result.already_retried.extend(old)
            result.due_now.extend(due_now)
            skipped |= {id_: "there is no such message" for id_ in some if id_ not in rows}
            for row in rows.values():
                if row.state is not State.FAILED and row.id not in due_now:
                    skipped[row.id] = "it was claimed meanwhile" if row.id in waiting else f"it is {row.state}"
        return msgspec.structs.replace(result, skipped=skipped)

    async def retry_queue(self, queue: str, *, reason: str | None = None) -> Retried:
        """All FAILED messages of a queue, or those with this reason; without a reason RETRYABLE ones become due too."""
        published: list[UUID] = []
        already_retried: list[UUID] = []
        async for rows in self._archived_repeatedly(queue, [State.FAILED], published):
            page = [row for row in rows if reason is None or row.reason == reason]
            new, old = await self._publish_again(page)
            published += new
            already_retried += old
        due_now = [] if reason is not None else await self._make_due(queue)
        return Retried(published=published, due_now=due_now, already_retried=already_retried, skipped={})

    async def _make_due(self, queue: str) -> list[UUID]:
        """Make the RETRYABLE messages of a queue due now; returns their ids. Read first: their places then change."""
        if Capability.RESCHEDULE not in self.capabilities:
            return []
        waiting: list[UUID] = []
        retryable = [State.RETRYABLE]
        async for rows in pages(lambda n, after: self.operations.browse(queue, states=retryable, limit=n, after=after)):
            waiting += [row.id for row in rows]
        return await self.operations.reschedule(waiting, delay=0) if waiting else []

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
        chosen = list(states) or list(SETTLED)
        async for rows in self._archived_repeatedly(queue, chosen, published, since, until):
            again = await self.operations.replay([row.id for row in rows], name=name, queue=to)
            published += [p.id for p in again if p.new]
        return published

    async def _publish_again(self, failed: Sequence[Row]) -> tuple[list[UUID], list[UUID]]:
        """(new ids, old ids that were retried before)

        The dedupe window ends, and copies are purged; the mark remembers, and the archive if no mark was written. A
        message is retried only once. A dead letter of a broker is gone when it was retried.
        """
        by_new_id = {replayed_id(row.id, RETRY): row.id for row in failed if not row.retried}
        is_archived = bool(by_new_id) and Capability.ARCHIVE in self._transport.capabilities
        known: set[UUID] = set()
        size, ids = most_after(failed), list(by_new_id)
        for begin in range(0, len(ids) if is_archived else 0, size):
            known |= {row.id for row in await self.operations.find(ids[begin : begin + size])}
        fresh = [old for new, old in by_new_id.items() if new not in known]
        published = [p.id for p in await self.operations.replay(fresh, name=RETRY) if p.new] if fresh else []
        if by_new_id and Capability.RESCHEDULE in self.capabilities:
            await self.operations.mark_retried(list(by_new_id.values()))
        before = [row.id for row in failed if row.retried]
        return published, before + [old for new, old in by_new_id.items() if new not in published]

    async def _archived_repeatedly(
        self,
        queue: str,
        states: Sequence[State],
        published: Sequence[UUID],
        since: datetime | None = None,
        until: datetime | None = None,
    ) -> AsyncIterator[list[Row]]:
        """All pages. Dead letters leave a broker's queue when they are published, and further ones can then be read.

        A message that was published and has failed again is left out.
        """
        while True:
            before, known = len(published), set(published)
            async for rows in pages(
                lambda limit, after: self.operations.archived(
                    queue, states=states, since=since, until=until, limit=limit, after=after
                )
            ):
                yield [row for row in rows if row.id not in known]
            if Capability.ARCHIVE in self._transport.capabilities or len(published) == before:
                return


def _age(stats: QueueStats, rate: QueueRates | None) -> float | None:
    """Seconds since the message that has waited longest was due, by the database's clock."""
    if stats.oldest_due_us is None or rate is None:
        return None
    return max(0.0, (rate.at_us - stats.oldest_due_us) / SECOND)
