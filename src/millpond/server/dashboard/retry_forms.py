"""Forms that retry failed messages: groups of alike errors, all that match a search, or single ones."""

from __future__ import annotations

from typing import Any

import msgspec

from millpond.errors import InvalidOption
from millpond.message import check_name
from millpond.server import types
from millpond.server.dashboard.fields import Confirm, field, ids_of, moment_of, queue_of, run_route
from millpond.server.dashboard.notices import done
from millpond.server.dashboard.rendering import HOME, count, plural
from millpond.server.handlers import operations
from millpond.server.handlers.call import Call

_AT_ONCE = 2000
"""Messages that one request publishes again; more continue in the background."""
_QUICK = 2000.0
"""Messages per second of a retry in the background without a chosen rate."""
_MOST_GROUPS = 1000


class Group(msgspec.Struct, frozen=True, array_like=True):
    """Failures to retry: their fingerprint, queue, and the number that was confirmed."""

    failure: int
    queue: str
    messages: int = 0


def _groups(call: Call) -> list[Group]:
    try:
        groups = [msgspec.json.decode(text, type=Group) for text in call.body.get("group", [])]
    except (msgspec.MsgspecError, UnicodeError, RecursionError):
        raise InvalidOption("a group of failures cannot be read; load the page again") from None
    if not groups:
        raise InvalidOption("no group is selected; go back and select some")
    for queue in {group.queue for group in groups}:
        call.need(check_name(queue, "queue"))
    return groups


async def ask_retry_failures(call: Call) -> Confirm:
    groups = _groups(call)
    counts: dict[tuple[str, int], int] = {}
    for queue in {group.queue for group in groups}:
        for found in await call.control.operations.failures(queue, limit=_MOST_GROUPS):
            counts[queue, found.fingerprint] = found.messages
    known = [Group(g.failure, g.queue, counts[g.queue, g.failure]) for g in groups if (g.queue, g.failure) in counts]
    number = sum(group.messages for group in known)
    if not number:
        raise InvalidOption("these failures are gone: they were retried or purged meanwhile; load the page again")
    return Confirm(
        title=f"Retry {plural(number, 'message')}?",
        text=f"They failed in {plural(len(known), 'group')} of alike errors. Each is published again once, with a new "
        "id; the failed one stays in the archive.",
        button=f"Retry {plural(number, 'message')}",
        fields=[("group", msgspec.json.encode(group).decode()) for group in known],
        has_rate=True,
    )


async def retry_failures(call: Call) -> tuple[str, str | None]:
    groups = _groups(call)
    rate = _rate(call)
    number = sum(group.messages for group in groups)
    in_background = rate is not None or number > _AT_ONCE
    published = 0
    for group in groups:
        body = types.RetryQueueRequest(
            failure=group.failure,
            limit=max(1, group.messages),
            rate=(rate or _QUICK) / len(groups) if in_background else None,
        )
        published += len((await run_route(call, "retry_queue", body, queue=group.queue)).published)
    if in_background:
        return done("background", number), None
    return done("retried" if published else "nothing", published), None


def _rate(call: Call) -> float | None:
    text = field(call, "rate").strip()
    if not text:
        return None
    try:
        rate = float(text)
    except ValueError:
        rate = -1.0
    if not 0 < rate <= 100_000:
        raise InvalidOption(f"the rate must be a number above 0 and at most 100,000 a second, not {text[:40]!r}")
    return rate


_FILTER = ("key", "reason", "error", "text", "path", "failure", "since", "until")


def _matching(call: Call) -> types.RetryQueueRequest:
    """The filter of the page of messages."""
    given: dict[str, Any] = {name: field(call, name) or None for name in _FILTER}
    given |= {name: moment_of(call, name) for name in ("since", "until")}
    try:
        return msgspec.convert(given, types.RetryQueueRequest, strict=False)
    except msgspec.ValidationError as e:
        raise InvalidOption(f"the filter cannot be used: {e}") from None


async def ask_retry_matching(call: Call) -> Confirm:
    queue, wanted = queue_of(call), _matching(call)
    preview = await call.control.preview_retry(operations.retry_choice(call, queue, wanted))
    number = preview.messages
    if not number and preview.complete:
        raise InvalidOption("no failed message matches, or all of them were retried before")
    if not number:
        raise InvalidOption(f"no failed message matches among the {count(preview.read)} that were read; filter by time")
    more = "" if preview.complete else f" These are the matches among the {count(preview.read)} newest failed messages."
    return Confirm(
        title=f"Retry {plural(number, 'failed message')} of {queue}?",
        text=f"Each is published again once, with a new id; the failed one stays in the archive.{more}",
        button=f"Retry {plural(number, 'message')}",
        fields=[
            ("queue", queue),
            ("messages", str(number)),
            *((name, field(call, name)) for name in _FILTER if field(call, name)),
        ],
        has_rate=True,
    )


async def retry_matching(call: Call) -> tuple[str, str | None]:
    queue, wanted, rate = queue_of(call), _matching(call), _rate(call)
    text = field(call, "messages")
    if not (text.isascii() and text.isdigit() and 0 < int(text[:9]) == int(text)):
        raise InvalidOption("the number of messages is missing; go back and load the page again")
    number = int(text)
    in_background = rate is not None or number > _AT_ONCE
    rate = rate or (_QUICK if in_background else None)
    wanted = msgspec.structs.replace(wanted, limit=number, rate=rate)
    published = len((await run_route(call, "retry_queue", wanted, queue=queue)).published)
    if in_background:
        return done("background", number), None
    return done("retried" if published else "nothing", published), None


async def ask_retry(call: Call) -> Confirm:
    number = len(ids_of(call))
    return Confirm(
        title=f"Retry {plural(number, 'message')}?",
        text="FAILED ones are published again with new ids; RETRYABLE ones become due now.",
        button=f"Retry {plural(number, 'message')}",
        fields=[("id", str(id_)) for id_ in ids_of(call)],
    )


async def retry(call: Call) -> tuple[str, str | None]:
    ids = ids_of(call)
    result: types.RetriedReply = await run_route(call, "retry", types.IdsRequest(ids=ids))
    to = f"{HOME}/messages/{result.published[0]}" if len(ids) == 1 and result.published else None
    if result.published:
        return done("retried", len(result.published)), to
    return done("due", len(result.due_now)) if result.due_now else done("nothing"), None


async def due_now(call: Call) -> tuple[str, str | None]:
    changed: types.Changed = await run_route(call, "reschedule", types.RescheduleRequest(ids=ids_of(call), delay=0))
    return done("due" if changed.ids else "nothing", len(changed.ids)), None
