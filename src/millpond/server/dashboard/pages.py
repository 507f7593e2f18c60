"""Pages that show queues, messages, failures, workers and streams."""

from __future__ import annotations

import asyncio
import re
from typing import Any
from uuid import UUID

import msgspec
from msgspec import UNSET
from starlette.responses import RedirectResponse, Response

from millpond.control.history import Every
from millpond.message import LIVE, RETRY, SETTLED, State, check_name, replayed_id
from millpond.seam.transport import Capability
from millpond.server import types
from millpond.server.dashboard import charts
from millpond.server.dashboard.rendering import Links, View
from millpond.server.grants import Role
from millpond.server.handlers import operations
from millpond.server.handlers import periodic as periodic_handlers
from millpond.server.handlers.call import Call, not_found
from millpond.server.types import Name

_WAITING = (State.PENDING, State.RETRYABLE)
_MOST_QUEUES = 200
_HISTORIES: tuple[Every, ...] = ("minute", "hour")
_FIRST = 0.2
"""Seconds for which the first page waits for the history of its queues. Later ones show what is counted."""
_MOST_SHOWN = 64 * 1024
"""Characters of a body that a page shows."""
_ESCAPED = re.compile(
    r"\\(?:u(?P<pair>d[89ab][0-9a-f]{2}\\ud[c-f][0-9a-f]{2})|u(?P<one>[0-9a-f]{4})|.)", re.IGNORECASE | re.DOTALL
)


class OverviewQuery(types.Request, kw_only=True):
    name: str | None = None


class QueueQuery(types.Request, kw_only=True):
    queue: Name


class PeriodicQuery(types.Request, kw_only=True):
    name: Name | None = None


class FindQuery(types.Request, kw_only=True):
    q: str = ""


async def root(call: Call) -> Response:
    """Redirects to the overview."""
    return RedirectResponse(Links(call.request)(), 307)


async def overview(call: Call) -> View:
    """All queues: rates, waiting messages, ages and failures, live."""
    queues = (await operations.queues(call)).queues
    name = (call.query.name or "").strip()
    chosen = [queue for queue in queues if name.casefold() in queue.queue.casefold()]
    listed = sorted(chosen, key=_waiting, reverse=True)[:_MOST_QUEUES]
    live_counts = call.request.state.live_counts
    await live_counts.begin()
    samples = live_counts.samples(call.grant.reaches)
    past = await _history(call, None)
    ages = [queue.oldest_for for queue in queues if queue.oldest_for is not None]
    return View(
        "overview.html",
        {
            "queues": sorted(listed, key=lambda queue: queue.queue),
            "all": len(chosen),
            "name": name,
            "any_queue": bool(queues),
            "waiting": sum(map(_waiting, queues)),
            "processing": _sum(queues, State.PROCESSING),
            "failed": _sum(queues, State.FAILED),
            "approximate": any(queue.approximate for queue in queues),
            "completed_rate": sum(queue.completed_per_second for queue in queues),
            "failed_rate": sum(queue.failed_per_second for queue in queues),
            "oldest": max(ages, default=None),
            "charts": [charts.settled(samples), charts.waiting(samples)],
            "history": past,
        },
    )


def _waiting(queue: types.QueueReply) -> int:
    return sum(queue.counts.get(state, 0) for state in _WAITING)


def _sum(queues: list[types.QueueReply], state: State) -> int:
    return sum(queue.counts.get(state, 0) for queue in queues)


async def queue(call: Call) -> View:
    """One queue: its counts, rates, next and last messages, and failures."""
    name = check_name(call.query.queue, "queue")
    call.need(name)
    found = await operations.queue(msgspec.structs.replace(call, path={"queue": name}))
    has = call.transport.capabilities
    waiting = settled = None
    if Capability.BROWSE in has:
        waiting = await _page(call, queue=name, state=list(_WAITING), limit=10)
    if Capability.ARCHIVE in has:
        settled = await _page(call, queue=name, state=list(SETTLED), limit=10)
    live_counts = call.request.state.live_counts
    await live_counts.begin()
    samples = live_counts.samples(lambda other: other == name)
    return View(
        "queue.html",
        {
            "queue": found,
            "waiting": _waiting(found),
            "next": waiting,
            "last": settled,
            "groups": await _groups(call, name) if Capability.ARCHIVE in has else [],
            "charts": [charts.settled(samples), charts.waiting(samples)],
            "history": await _history(call, name),
            "can_pause": Capability.PAUSE in has,
            "can_purge": Capability.ARCHIVE in has,
        },
    )


async def _history(call: Call, queue: str | None) -> list[charts.HistoryChart]:
    """Charts of the last hour, day and month, as far as they are counted; none without an archive."""
    if Capability.ARCHIVE not in call.transport.capabilities:
        return []
    times: tuple[Every, ...] = _HISTORIES if call.state.settings.lake is None else (*_HISTORIES, "day")
    return [
        charts.history(await call.state.history(queue, call.grant, by, within=_FIRST, new_only=True)) for by in times
    ]


async def _page(call: Call, **query: Any) -> types.Messages:
    return await operations.search(msgspec.structs.replace(call, query=types.MessagesQuery(**query)))


async def messages(call: Call) -> View:
    """Messages by queue, state, key, error, text and time, page by page."""
    query: types.MessagesQuery = call.query
    names = [found.queue for found in (await operations.queues(call)).queues]
    page = None
    if query.queue is not None or call.grant.all_queues:
        asked = msgspec.structs.replace(query, limit=min(query.limit, 50))
        page = await operations.search(msgspec.structs.replace(call, query=asked))
    given = {name: value for name, value in msgspec.structs.asdict(query).items() if value and name != "limit"}
    given["state"] = [state.value for state in query.state]
    given |= {name: given[name].isoformat() for name in ("since", "until") if name in given}
    # A search that compares rows reads thousands of them: it is not repeated while the page is open.
    is_live = not given.keys() - {"queue", "state", "failure"}
    has = call.transport.capabilities
    can_retry = query.queue is not None and query.state in ([], [State.FAILED]) and Capability.ARCHIVE in has
    chosen = [(name, value) for name, value in given.items() if name not in ("state", "cursor")]
    values = {
        "can_retry": can_retry,
        "chosen": chosen,
        "query": query,
        "page": page,
        "names": names,
        "given": given,
        "states": list(State),
    }
    return View("messages.html", values, is_live=is_live)


async def message(call: Call) -> View:
    """One message: why it does not run, body, headers, attempts and their errors."""
    found = await operations.message(call)
    has = call.transport.capabilities
    again = None
    if found.state is State.FAILED and Capability.ARCHIVE in has:
        again = await call.control.message(replayed_id(found.id, RETRY))
    return View(
        "message.html",
        {
            "message": found,
            "again": again,
            "body": _body(found),
            "reasons": (await operations.why(call)).reasons if found.state in LIVE and Capability.BROWSE in has else [],
            "can_change": Capability.RESCHEDULE in has,
            "can_interrupt": found.state is State.PROCESSING and Capability.PRESENCE in has,
            "waits": found.state in _WAITING,
        },
    )


def _body(found: types.MessageReply) -> dict[str, Any]:
    """The body as text: JSON with indents, and long ones cut."""
    if found.base64 is not UNSET:
        kind, text = "bytes, shown as base64", str(found.base64)
    elif isinstance(found.body, msgspec.Raw):
        kind, text = "JSON", _indented(bytes(found.body))
    else:
        kind, text = "text", "" if found.body is UNSET else str(found.body)
    return {"kind": kind, "text": text[:_MOST_SHOWN], "cut": max(0, len(text) - _MOST_SHOWN)}


def _indented(raw: bytes) -> str:
    """JSON with indents. Escaped letters are shown as letters; invisible characters stay escaped."""
    try:
        text = msgspec.json.format(raw, indent=2).decode(errors="replace")
    except (msgspec.MsgspecError, RecursionError):
        text = raw.decode(errors="replace")
    return _ESCAPED.sub(_letter, text)


def _letter(found: re.Match[str]) -> str:
    pair, one = found["pair"], found["one"]
    if pair is not None:  # two halves of a character
        high, low = int(pair[:4], 16), int(pair[-4:], 16)
        letter = chr(0x10000 + ((high - 0xD800) << 10) + low - 0xDC00)
    else:
        letter = "" if one is None else chr(int(one, 16))
    return letter if letter > "\x7f" and letter.isprintable() else found[0]


async def failures(call: Call) -> View:
    """Failed messages in groups of alike errors, to choose and retry."""
    if call.query.queue is not None:
        call.need(check_name(call.query.queue, "queue"))
    groups = await _groups(call, call.query.queue, call.query.limit)
    return View("failures.html", {"groups": groups, "queue": call.query.queue, "limit": call.query.limit})


async def _groups(call: Call, queue: str | None, limit: int = 100) -> list[types.FailureReply]:
    """Groups of one queue, or of all that the caller reaches."""
    chosen: list[str | None] = [queue]
    if queue is None and not call.grant.all_queues:
        views = await call.state.overview()
        failed = [
            view.stats for view in views if view.stats.counts.get(State.FAILED) and call.grant.reaches(view.stats.queue)
        ]
        chosen = [stats.queue for stats in failed]
    query = types.FailuresQuery(limit=limit)
    lists = await asyncio.gather(
        *(
            operations.failures(msgspec.structs.replace(call, query=msgspec.structs.replace(query, queue=name)))
            for name in chosen
        )
    )
    found = [group for groups in lists for group in groups.failures]
    return sorted(found, key=lambda group: group.newest_at, reverse=True)[:limit]


async def workers(call: Call) -> View:
    """Workers with their beats, and the number of messages that each holds."""
    found = (await operations.workers(call)).workers
    return View("workers.html", {"workers": found})


async def worker(call: Call) -> View:
    """Messages that one worker holds."""
    held = await operations.worker_messages(call)
    found = (await operations.workers(call)).workers
    status = next((status for status in found if status.id == call.path["worker"]), None)
    if status is None and not held.messages:
        raise not_found("this worker has left, and holds no message")
    return View("worker.html", {"worker": status, "held": held.messages})


async def periodic(call: Call) -> View:
    """Periodic messages with their schedules; operators pause and edit them."""
    found = (await periodic_handlers.periodic(call)).periodic
    edited = next((one for one in found if one.name == call.query.name), None)
    if call.query.name is not None and edited is None:
        raise not_found(f"there is no periodic message {call.query.name[:80]!r}")
    changes = call.grant.has(Role.OPERATE) and call.grant.all_queues
    return View("periodic.html", {"periodic": found, "edited": edited, "changes": changes}, is_live=edited is None)


async def shards(call: Call) -> View:
    """Shards of a pond of several databases: key ranges, live messages, and answers."""
    return View("shards.html", {"shards": (await operations.shards(call)).shards})


async def doctor(call: Call) -> View:
    """Faults around the queues, with their remedies."""
    return View("doctor.html", {"findings": (await operations.doctor(call)).findings}, is_live=False)


async def streams(call: Call) -> View:
    """Spark queries that consume queues, the messages that each holds, and its lag."""
    found = (await operations.streams(call)).streams
    return View("streams.html", {"streams": found})


async def actions(call: Call) -> View:
    """The last actions of operators."""
    found = (await operations.actions(call)).actions
    return View(
        "actions.html",
        {"actions": [(action, msgspec.json.encode(action.detail).decode(errors="replace")) for action in found]},
    )


async def find(call: Call) -> Response:
    """Redirects to the message with an id, to the queue of a name, or to the messages of a key."""
    links, text = Links(call.request), call.query.q.strip()
    try:
        return RedirectResponse(links(f"/messages/{UUID(text)}"), 303)
    except ValueError:
        names = [found.queue for found in (await operations.queues(call)).queues]
    if text in names:
        return RedirectResponse(links("/queue", queue=text), 303)
    if any(text.casefold() in name.casefold() for name in names) or not text:
        return RedirectResponse(links("", name=text), 303)
    return RedirectResponse(links("/messages", key=text), 303)
