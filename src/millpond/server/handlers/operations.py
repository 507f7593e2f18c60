"""Operators' verbs: see queues, messages, workers and streams, and change them."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import Any
from uuid import UUID

import msgspec

from millpond import codec
from millpond.clock import as_datetime
from millpond.control import Choice, QueueView, Retried
from millpond.control.bounded_reads import find_pages
from millpond.control.history import SettledCounts
from millpond.errors import InvalidOption, not_supported
from millpond.message import check_name
from millpond.seam.operations import Row
from millpond.seam.transport import Capability
from millpond.server import types
from millpond.server.grants import Role
from millpond.server.handlers.call import Call, forbidden, not_found
from millpond.server.handlers.messages import body_fields

_HISTORY_WITHIN = 5.0
"""Seconds for which a request waits for counts of the archive."""

# --- see --------------------------------------------------------------------------------------------------


async def queues(call: Call) -> types.Queues:
    """Counts, rates and ages of all queues that the token reaches."""
    views = [view for view in await call.state.overview() if call.grant.reaches(view.stats.queue)]
    return types.Queues(queues=[_queue(view) for view in views])


async def queue(call: Call) -> types.QueueReply:
    """Counts, rates and age of one queue."""
    await call.control.check_queue(call.queue)
    (view,) = await call.control.overview([call.queue])
    return _queue(view)


def _queue(view: QueueView) -> types.QueueReply:
    stats = view.stats
    return types.QueueReply(
        queue=stats.queue,
        counts={state.value: number for state, number in stats.counts.items()},
        approximate=stats.approximate,
        paused=stats.paused,
        completed_per_second=view.completed_per_second,
        failed_per_second=view.failed_per_second,
        oldest_for=view.oldest_for,
    )


async def history(call: Call) -> types.History:
    """Messages settled in each of the last minutes, hours or days, of one queue or of all that the token reaches."""
    query: types.HistoryQuery = call.query
    if Capability.ARCHIVE not in call.transport.capabilities:
        raise not_supported("the history", Capability.ARCHIVE)
    if query.queue is not None:
        call.need(check_name(query.queue, "queue"))
        if query.by != "day":  # a lake has queues whose last message is purged
            await call.control.check_queue(query.queue)
    counted = await call.state.history(query.queue, call.grant, query.by, within=_HISTORY_WITHIN)
    return history_reply(counted)


def history_reply(counted: SettledCounts) -> types.History:
    return types.History(
        by=counted.by,
        buckets=[
            types.BucketReply(
                begin=as_datetime(one.begin_us), completed=one.completed, failed=one.failed, at_least=one.at_least
            )
            for one in counted.buckets
        ],
        complete=counted.complete,
        missing=list(counted.missing),
    )


async def search(call: Call) -> types.Messages:
    """Live messages in the order of claims, then archived ones, newest first, page by page."""
    query: types.MessagesQuery = call.query
    if query.queue is None:
        call.need_all_queues("a search over all queues")
    else:
        call.need(check_name(query.queue, "queue"))
    if not (query.text is None and query.path is None and query.error is None) and not _sees_all(call, query.queue):
        raise forbidden("bodies and errors of some of these queues are masked for your token: they cannot be searched")
    choice = Choice(
        queue=query.queue,
        states=query.state,
        key=query.key,
        reason=query.reason,
        error=query.error,
        text=query.text,
        path=query.path,
        since=query.since,
        until=query.until,
        failure=query.failure,
    )
    page = await call.control.search(choice, limit=query.limit, cursor=query.cursor)
    return types.Messages(messages=[shown(call, row) for row in page.rows], cursor=page.cursor, read=page.read)


def _sees_all(call: Call, queue: str | None) -> bool:
    """Whether the caller may read the bodies of a queue, or of all."""
    if queue is not None:
        return call.state.sees_bodies(call.grant, queue)
    return any(
        role in call.grant.roles and not call.state.settings.mask.get(role) for role in (Role.READ, Role.OPERATE)
    )


async def message(call: Call) -> types.MessageReply:
    """One message with its last failed attempts."""
    row = await call.control.message(_id(call.path["id"]))
    if row is None or not call.grant.reaches(row.queue):
        raise not_found(f"there is no message {call.path['id'][:40]}: it may have been purged, or never committed")
    return shown(call, row)


async def why(call: Call) -> types.WhyReply:
    """All reasons why a message does not run; the first is the one to act on."""
    answer = await call.control.why(_id(call.path["id"]), sees=lambda queue: call.state.sees_bodies(call.grant, queue))
    if answer.queue is None or not call.grant.reaches(answer.queue):
        call.need_all_queues("an id that is not in your queues")
    return types.WhyReply(
        id=answer.id,
        queue=answer.queue,
        state=answer.state,
        reasons=[types.ReasonReply(kind=r.kind, text=r.text, remedy=r.remedy) for r in answer.reasons],
    )


async def doctor(call: Call) -> types.Findings:
    """Find faults around the queue; errors come first."""
    call.need_all_queues("the doctor")
    found = await call.control.doctor()
    return types.Findings(
        findings=[types.FindingReply(kind=f.kind, severity=f.severity, text=f.text, remedy=f.remedy) for f in found]
    )


def shown(call: Call, row: Row) -> types.MessageReply:
    """A message as this caller may see it."""
    sees = call.state.sees_bodies(call.grant, row.queue)
    seen: dict[str, Any] = {"masked": True}
    if sees:
        seen = {
            "headers": dict(row.headers),
            "error": row.error,
            **body_fields(row.payload, row.headers.get(codec.CONTENT_TYPE)),
        }
    return types.MessageReply(
        id=row.id,
        queue=row.queue,
        state=row.state,
        key=row.key,
        priority=row.priority,
        deliveries=row.deliveries,
        attempts=row.attempts,
        crashes=row.crashes,
        created_at=row.created_at,
        due_at=row.due_at,
        expires_at=row.expires_at,
        acquired_at=row.acquired_at,
        leased_until=row.lease_at,
        archived_at=row.archived_at,
        reason=row.reason,
        failed_attempts=[
            types.AttemptReply(
                claimed_at=attempt.claimed_at,
                ended_at=attempt.ended_at,
                took=attempt.took,
                error=attempt.error if sees else None,
                traceback=attempt.traceback if sees else None,
            )
            for attempt in row.failed_attempts
        ],
        **seen,
    )


async def failures(call: Call) -> types.Failures:
    """FAILED messages that were not published again, in groups of alike errors."""
    if call.query.queue is None:
        call.need_all_queues("a list over all queues")
    else:
        call.need(check_name(call.query.queue, "queue"))
    groups = await call.control.operations.failures(call.query.queue, limit=call.query.limit)
    return types.Failures(
        failures=[
            types.FailureReply(
                queue=group.queue,
                fingerprint=group.fingerprint,
                messages=group.messages,
                oldest_at=as_datetime(group.oldest_us),
                newest_at=as_datetime(group.newest_us),
                id=group.id,
                reason=group.reason,
                error=group.error if call.state.sees_bodies(call.grant, group.queue) else None,
            )
            for group in groups
        ]
    )


async def workers(call: Call) -> types.WorkersReply:
    """Workers, their queues, and the number of messages that each holds."""
    found = []
    for status in await call.control.workers.status():
        own = status.queues
        seen = own if own is None or call.grant.all_queues else [name for name in own if call.grant.reaches(name)]
        if seen or call.grant.all_queues:
            found.append(
                types.WorkerReply(
                    id=str(status.id),  # as text: JavaScript has no integers of 62 bits
                    name=status.name,
                    queues=None if seen is None else list(seen),
                    started_at=as_datetime(status.started_us),
                    beat_at=as_datetime(status.beat_us),
                    silent_for=status.silent_for,
                    beats=status.beats,
                    stopping=status.stopping,
                    held=status.held,
                    oldest_held_at=_when(status.oldest_held_us),
                )
            )
    return types.WorkersReply(workers=found)


async def worker_messages(call: Call) -> types.Messages:
    """Messages that a worker holds, the first 100."""
    text = call.path["worker"]
    if not (text.isascii() and text.isdigit() and len(text) < 20):
        raise not_found(f"there is no worker {text[:40]!r}")
    rows = await call.control.worker_messages(min(int(text), 2**63 - 1))
    seen = [row for row in rows if call.grant.reaches(row.queue)]
    return types.Messages(messages=[shown(call, row) for row in seen], read=len(rows))


async def streams(call: Call) -> types.StreamsReply:
    """Spark queries that consume queues, the messages that each holds, and its lag."""
    call.need_all_queues("the list of streams")
    return types.StreamsReply(
        streams=[
            types.StreamReply(
                name=view.status.name,
                epoch=view.status.epoch,
                acked_seq=view.status.acked_seq,
                held=view.status.held,
                held_for=view.status.held_for,
                queues=list(view.queues),
                waiting=view.waiting,
                waiting_complete=view.complete,
                behind=view.behind,
                opened_at=_when(view.status.opened_us),
            )
            for view in await call.control.stream_views()
        ]
    )


async def shards(call: Call) -> types.ShardsReply:
    """Shards of a pond of several databases: key ranges, live messages, and the time of their answer."""
    call.need_all_queues("the list of shards")
    return types.ShardsReply(
        shards=[
            types.ShardReply(
                name=shard.name,
                key_ranges=list(shard.key_ranges),
                answers=shard.answers,
                seconds=shard.seconds,
                live=shard.live,
            )
            for shard in await call.control.shards()
        ]
    )


async def actions(call: Call) -> types.Actions:
    """The last actions of operators."""
    call.need_all_queues("the list of actions")
    recorded = await call.control.access.actions(call.query.limit)
    return types.Actions(
        actions=[
            types.ActionReply(
                at=as_datetime(action.at_us),
                actor=action.actor,
                action=action.action,
                queue=action.queue,
                detail=_detail(action.detail),
            )
            for action in recorded
        ]
    )


def _detail(text: str) -> Any:
    try:
        return msgspec.json.decode(text)
    except msgspec.MsgspecError:  # cut, because it was long
        return text


# --- change -----------------------------------------------------------------------------------------------


async def retry(call: Call) -> types.RetriedReply:
    """Publish FAILED messages again; make RETRYABLE ones due now."""
    ids, unknown = await _reached(call)
    result = await call.control.retry(ids) if ids else Retried(published=[], due_now=[], already_retried=[], skipped={})
    reply = _retried(result)
    reply.skipped |= {str(id_): "there is no such message" for id_ in unknown}
    return reply


async def retry_queue(call: Call) -> types.RetriedReply:
    """Publish all FAILED messages of a queue that match again, or count them with `preview`."""
    body: types.RetryQueueRequest = call.body
    choice = retry_choice(call, call.queue, body)
    if body.preview or body.rate is not None:
        preview = await call.control.preview_retry(choice)
        if not body.preview:
            work = call.control.retry_matching(choice, rate=body.rate, limit=body.limit)
            call.state.in_background(work, f"retry of {preview.messages} messages of {call.queue}")
        return types.RetriedReply(matching=preview.messages, complete=preview.complete, in_background=not body.preview)
    most = call.state.settings.limits.batch
    reply = _retried(await call.control.retry_matching(choice, limit=min(body.limit or most, most)))
    reply.complete = body.limit is not None or len(reply.published) < most
    return reply


def retry_choice(call: Call, queue: str, body: types.RetryQueueRequest) -> Choice:
    """The messages that a retry takes, as far as the caller may read the parts that are compared."""
    if not (body.text is None and body.path is None and body.error is None) and not _sees_all(call, queue):
        raise forbidden("bodies and errors of this queue are masked for your token: choose by reason or failure")
    return Choice(
        queue=queue,
        key=body.key,
        reason=body.reason,
        error=body.error,
        text=body.text,
        path=body.path,
        failure=body.failure,
        since=body.since,
        until=body.until,
    )


def _retried(result: Retried) -> types.RetriedReply:
    return types.RetriedReply(
        published=result.published,
        due_now=result.due_now,
        already_retried=result.already_retried,
        skipped={str(id_): reason for id_, reason in result.skipped.items()},
    )


async def reschedule(call: Call) -> types.Changed:
    """Change priority, due time or attempts of waiting messages; returns the changed ids."""
    ids, _ = await _reached(call)
    body: types.RescheduleRequest = call.body
    if all(value is None for value in (body.priority, body.delay, body.due_at, body.attempts)):
        raise InvalidOption("reschedule changes nothing: give priority, due_at, delay or attempts")
    changed = await call.control.operations.reschedule(
        ids, priority=body.priority, delay=body.delay, due_at=body.due_at, attempts=body.attempts
    )
    return types.Changed(ids=changed)


async def done(call: Call) -> types.Changed:
    """Make waiting messages COMPLETED without running them; returns the changed ids."""
    ids, _ = await _reached(call)
    return types.Changed(ids=await call.control.operations.done(ids, force=call.body.force))


async def cancel(call: Call) -> types.CancelledReply:
    """Make waiting messages FAILED without running them; with `running`, interrupt running ones too."""
    ids, _ = await _reached(call)
    body: types.CancelRequest = call.body
    done = await call.control.operations.cancel(ids, reason=body.reason)
    left = [id_ for id_ in ids if id_ not in done]
    asked = await call.control.workers.cancel(left, reason=body.reason) if body.running and left else []
    return types.CancelledReply(ids=done, requested=asked)


async def pause(call: Call) -> types.Done:
    """Stop claims from a queue. Publishing continues."""
    await call.control.operations.pause(call.queue)
    return types.Done(done=True)


async def resume(call: Call) -> types.Done:
    """End a pause."""
    await call.control.operations.resume(call.queue)
    return types.Done(done=True)


async def purge(call: Call) -> types.Purged:
    """Delete archived messages by age, up to a time, or by the queue's retention."""
    body: types.PurgeRequest = call.body
    purged = await call.control.operations.purge(
        call.queue, older_than=body.older_than, until=body.until, states=body.states or None
    )
    return types.Purged(purged=purged)


async def replay(call: Call) -> types.ReplayReply:
    """Publish archived messages of a queue again, each once for each name of a replay."""
    body: types.ReplayRequest = call.body
    if body.to is not None:
        call.need(check_name(body.to, "to"))
        if _sees_all(call, body.to) and not _sees_all(call, call.queue):
            raise forbidden(
                "bodies of the queue are masked for your token: replay it to itself or another masked queue"
            )
    published = await call.control.replay_queue(
        call.queue, name=body.name, states=body.states, since=body.since, until=body.until, to=body.to
    )
    return types.ReplayReply(published=published)


async def release_stream(call: Call) -> types.Released:
    """Fence out the driver of a stream and give back its messages."""
    call.need_all_queues("the release of a stream")
    return types.Released(released=await call.control.streams.release(call.path["stream"]))


async def _reached(call: Call) -> tuple[list[UUID], list[UUID]]:
    """The ids that the caller may change, and those of messages that do not exist for it."""
    ids: Sequence[UUID] = list(dict.fromkeys(call.body.ids))
    call.check_size(len(ids))
    if call.grant.all_queues:
        return list(ids), []
    known: set[UUID] = set()
    async for _, rows in find_pages(call.control.operations, ids):
        known |= {row.id for row in rows if call.grant.reaches(row.queue)}
    return [id_ for id_ in ids if id_ in known], [id_ for id_ in ids if id_ not in known]


def _id(text: str) -> UUID:
    try:
        return UUID(text)
    except ValueError:
        raise InvalidOption(f"{text[:40]!r} is not the id of a message") from None


def _when(us: int | None) -> datetime | None:
    return None if us is None else as_datetime(us)
