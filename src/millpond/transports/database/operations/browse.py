"""Counts, pages of live and archived messages, and messages by id, as steps.

Pages go by key, never by offset: each is one or a few ranges of an index, at a cost in proportion to the page.
A filter without an index (the key; one of the waiting states) costs as much as the rows that it skips.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from math import inf
from typing import Any
from uuid import UUID

import msgspec

from millpond.message import SETTLED, State
from millpond.seam.operations import QueueStats, Row
from millpond.transports.database.operations.retry_marks import RETRIED_COUNTS
from millpond.transports.database.sql.columns import HISTORY, LIVE, SETTLED_ROW, SUSPECT_LANE, as_rows
from millpond.transports.database.sql.dialect import ARCHIVED_QUEUES, FIRST_ARCHIVED_QUEUE, Dialect
from millpond.transports.database.sql.statement import Query, Steps

_FIND = f"""
SELECT {LIVE}{HISTORY.format("m")} FROM {{message}} m {{id_index}} WHERE m.id {{ids}}
UNION ALL
SELECT {SETTLED_ROW}{HISTORY.format("a")} FROM {{archive}} a {{archive_id_index}} WHERE a.id {{ids}}
"""
SETTINGS = "SELECT name, paused, keep_completed, keep_failed FROM {queue}"

# --- count ----------------------------------------------------------------------------------------------

_EXACT = """
(SELECT count(*) FROM {{archive}} a {{archive_index}} WHERE a.queue = n.name AND a.state = '{state}')
"""
# Counted only if there is no row beyond the limit.
_BOUNDED = f"""
CASE WHEN (SELECT a.state FROM {{{{archive}}}} a {{{{archive_index}}}}
WHERE a.queue = n.name AND a.state = '{{state}}' LIMIT 1 OFFSET :counted) IS NULL THEN {_EXACT} ELSE -1 END
"""


def _count_text(*, chosen: bool, exact: bool) -> str:
    """One statement sees one snapshot: a message that is settled meanwhile is counted once.

    Grouped by queue alone, which is the order of the index: nothing is sorted.
    """
    of_queues = "AND m.queue {queues}" if chosen else ""
    counted = _EXACT if exact else _BOUNDED
    archived = "".join(
        f"UNION ALL SELECT n.name, '{state}', {counted.format(state=state)}, 0, NULL FROM {{names}} "
        for state in SETTLED
    )
    return f"""
    SELECT m.queue, 'PENDING', count(*), count(CASE WHEN m.state = 'RETRYABLE' THEN 1 END),
    min(CASE WHEN m.due_at <= {{now}} THEN m.due_at END)
    FROM {{message}} m {{claim_index}} WHERE {{ready}} {of_queues} GROUP BY m.queue
    UNION ALL
    SELECT m.queue, 'PROCESSING', count(*), 0, NULL
    FROM {{message}} m {{lease_index}} WHERE {{held}} {of_queues} GROUP BY m.queue
    {archived}"""


_COUNTS = {
    (chosen, exact): _count_text(chosen=chosen, exact=exact) for chosen in (False, True) for exact in (False, True)
}


def count_messages(
    d: Dialect, queues: Sequence[str] | None, *, exact: bool, limit: int, now: int | None
) -> Steps[list[QueueStats]]:
    """`limit`: archived messages of one queue and state that are counted one by one unless `exact`."""
    settings = {row[0]: row[1:] for row in (yield Query(d.sql(SETTINGS), {}))}
    names = list(queues) if queues is not None else (yield from archived_queues(d))
    params: dict[str, Any] = {"names": names_in(names), "now": now, "counted": limit}
    if queues is not None:
        params["queues"] = names
    rows = yield Query(d.sql(_COUNTS[queues is not None, exact]), params)
    counts: dict[str, dict[State, int]] = {queue: dict.fromkeys(State, 0) for queue in [*(queues or ()), *settings]}
    oldest: dict[str, int] = {}
    approximate = set()
    for queue, state, number, retryable, due in rows:
        states = counts.setdefault(queue, dict.fromkeys(State, 0))
        if number < 0:
            approximate.add(queue)
            number = limit
        states[State(state)] = int(number) - int(retryable)
        if retryable:
            states[State.RETRYABLE] = int(retryable)
        if due is not None:
            oldest[queue] = int(due)
    retried = {queue: int(number) for queue, number in (yield Query(d.sql(RETRIED_COUNTS), {}))}
    for queue, number in retried.items():
        if queue in counts:
            counts[queue][State.FAILED] = max(0, counts[queue][State.FAILED] - number)
    return [
        QueueStats(
            queue=queue,
            counts=counts[queue],
            retried=retried.get(queue, 0),
            approximate=queue in approximate,
            paused=bool(paused),
            oldest_due_us=oldest.get(queue),
            keep_completed_us=completed,
            keep_failed_us=failed,
        )
        for queue in (queues if queues is not None else sorted(counts))
        for paused, completed, failed in [settings.get(queue, (0, None, None))]
    ]


def archived_queues(d: Dialect) -> Steps[list[str]]:
    """Every queue that has archived messages: as many per query as the database finds."""
    rows = yield Query(d.sql(FIRST_ARCHIVED_QUEUE), {})
    names: list[str] = []
    while found := [name for (name,) in rows if name is not None]:
        names += found
        rows = yield Query(d.sql(ARCHIVED_QUEUES), {"after": names[-1]})
    return names


def names_in(names: Sequence[str]) -> str:
    """Queue names as the parameter behind `{names}`."""
    return msgspec.json.encode(names).decode()


# --- live messages --------------------------------------------------------------------------------------

_ORDER = "m.lane, m.due_at, m.id"
_ACROSS = f"m.queue, {_ORDER}"


def live_page(
    d: Dialect,
    queue: str | None,
    *,
    states: Sequence[State],
    key: str | None,
    worker: int | None = None,
    limit: int,
    after: tuple[str, bool, int, int, UUID] | None,
) -> Steps[list[Row]]:
    """A page in the order of claims. Messages being processed are few: they are sorted into it."""
    found: dict[UUID, Row] = {}
    waiting = [state.value for state in states if state is not State.PROCESSING]
    for held in (False, True):
        if waiting if not held else State.PROCESSING in states:
            where = "{held}" if held else "{ready}"
            params: dict[str, Any] = {}
            if not held and len(waiting) == 1:
                where += " AND m.state = :state"
                params["state"] = waiting[0]
            if key is not None:
                where += " AND m.{key} = :key"
                params["key"] = key
            if worker is not None:
                where += " AND m.worker = :worker"
                params["worker"] = worker
            index = "{lease_index}" if held else "{claim_index}"
            text = f"SELECT {LIVE} FROM {{message}} m {index} WHERE {where}"
            page = yield from _page(d, text, params, _after_live(d, queue, after), limit)
            found |= {row.id: row for row in page}
    return sorted(found.values(), key=lambda row: row.position)[:limit]


def _after_live(d: Dialect, queue: str | None, after: tuple[str, bool, int, int, UUID] | None) -> _Ranges:
    """Ranges of the index after a position, in order."""
    if after is None:
        # A range although it excludes nothing: MySQL checks conditions within the index only in ranges.
        yield (
            ("m.queue >= :lowest", _ACROSS, {"lowest": "\x01"})
            if queue is None
            else (
                "m.queue = :queue",
                _ORDER,
                {"queue": queue},
            )
        )
        return
    last_queue, suspect, priority, due, id_ = after
    if queue is not None and queue != last_queue:
        # A position in another listing: only whole queues before or after this one can follow.
        if queue > last_queue:
            yield "m.queue = :queue", _ORDER, {"queue": queue}
        return
    here = {"queue": last_queue, "lane": suspect * SUSPECT_LANE + priority}
    at = "m.queue = :queue AND m.lane = :lane"
    yield f"{at} AND m.due_at = :due AND m.id > :id", "m.id", {**here, "due": due, "id": d.id_in(id_)}
    yield f"{at} AND m.due_at > :due", "m.due_at, m.id", {**here, "due": due}
    yield "m.queue = :queue AND m.lane > :lane", _ORDER, here
    if queue is None:
        yield "m.queue > :queue", _ACROSS, {"queue": last_queue}


# --- archived messages ----------------------------------------------------------------------------------

_NEWEST = "a.archived_at DESC, a.id DESC"


def archived_page(
    d: Dialect,
    queue: str | None,
    *,
    states: Sequence[State],
    key: str | None,
    since: int | None,
    until: int | None,
    failure: int | None = None,
    limit: int,
    after: tuple[int, UUID] | None,
) -> Steps[list[Row]]:
    """A page, newest first. The index orders each queue and state by itself; their pages are merged."""
    where, params = "a.queue = :queue AND a.state = :state", dict[str, Any]()
    if key is not None:
        where += " AND a.{key} = :key"
        params["key"] = key
    if since is not None:
        where += " AND a.archived_at >= :since"
        params["since"] = since
    if until is not None:
        where += " AND a.archived_at < :until"
        params["until"] = until
    index = "{archive_index}"
    if failure is not None:
        where += " AND a.failure = :failure"
        params["failure"] = failure
        index = "{failure_index}"
    text = f"SELECT {SETTLED_ROW} FROM {{archive}} a {index} WHERE {where}"
    top = until if after is None else after[0] + 1 if until is None else min(until, after[0] + 1)
    found: list[Row] = []
    for newest, name, state in (yield from _newest(d, queue, states, top)):
        if len(found) == limit and newest < (found[-1].archived_us or 0):
            break
        chosen = {**params, "queue": name, "state": state.value}
        found += yield from _page(d, text, chosen, _after_archived(d, after), limit)
        found.sort(key=lambda row: row.position, reverse=True)
        del found[limit:]
    return found


def _newest(
    d: Dialect, queue: str | None, states: Sequence[State], before: int | None
) -> Steps[list[tuple[float, str, State]]]:
    """(newest archived_at, queue, state), newest first. A page over all queues seldom needs more than a few."""
    if queue is not None:
        return [(inf, queue, state) for state in states]
    # Queue by queue: with a row of an outer query MySQL finds the queue in the index, but not the time.
    older, params = ("", {}) if before is None else ("AND a.archived_at < :before", {"before": before})
    heads = ", ".join(
        f"(SELECT a.archived_at FROM {{archive}} a {{archive_index}} WHERE a.queue = :queue "
        f"AND a.state = '{state}' {older} ORDER BY a.archived_at DESC LIMIT 1)"
        for state in states
    )
    found: list[tuple[float, str, State]] = []
    for name in (yield from archived_queues(d)):
        ((*newest,),) = yield Query(d.sql(f"SELECT {heads}"), {"queue": name, **params})
        found += [(at, name, state) for at, state in zip(newest, states, strict=True) if at is not None]
    return sorted(found, reverse=True)


def _after_archived(d: Dialect, after: tuple[int, UUID] | None) -> _Ranges:
    if after is None:
        yield "1 = 1", _NEWEST, {}
        return
    at, id_ = after
    yield "a.archived_at = :at AND a.id < :id", "a.id DESC", {"at": at, "id": d.id_in(id_)}
    yield "a.archived_at < :at", _NEWEST, {"at": at}


# --- both -----------------------------------------------------------------------------------------------

_Ranges = Iterator[tuple[str, str, Mapping[str, Any]]]
"""Condition, order and parameters. The order lacks columns that the condition fixes: MySQL would sort."""


def find_rows(d: Dialect, ids: Sequence[Any]) -> Steps[list[Row]]:
    """These messages, live ones first. One statement reads both tables: none is missed between them."""
    return as_rows((yield Query(d.sql(_FIND), {"ids": ids})), d.id_out)


def _page(d: Dialect, text: str, params: Mapping[str, Any], ranges: _Ranges, limit: int) -> Steps[list[Row]]:
    """Read one range after the other until the page is full.

    With one comparison of rows, (a, b) > (:a, :b), MySQL does not find the place in the index.
    """
    page: list[Row] = []
    for range_, order, more in ranges:
        statement = d.sql(f"{text} AND {range_} ORDER BY {order} LIMIT :limit")
        page += as_rows((yield Query(statement, {**params, **more, "limit": limit - len(page)})), d.id_out)
        if len(page) == limit:
            break
    return page
