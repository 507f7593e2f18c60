"""The cost of a page does not grow with the table, even by a plan that was made while the table was empty.

Counted, not timed: rows that PostgreSQL fetched, index entries that MariaDB read, steps of SQLite's virtual machine.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from millpond import State
from millpond.message import new_id
from millpond.transports.database.exports.ranges import PurgeCheck
from millpond.transports.database.messages.publish import forget_ids
from millpond.transports.database.operations.browse import archived_page, archived_queues, find_rows, live_page
from millpond.transports.database.operations.purge import purge_some
from millpond.transports.database.operations.replay import not_archived, publish_again
from millpond.transports.database.runner import Mode
from millpond.transports.database.sql.statement import Query, Statement, Steps
from millpond.transports.database.store import DatabaseStore
from tests.shared import KINDS
from tests.stores import steps_of

ROWS = 50_000
START = 1_767_225_600_000_000

# Three queues; ids in no order; a row in a thousand is RETRYABLE, one in a hundred FAILED.
SERIES = {
    "sqlite": (
        "(WITH RECURSIVE s (n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM s WHERE n < {rows}) SELECT n FROM s) AS s",
        "randomblob(16)",
        "'q' || (n % 3)",
        "zeroblob(100)",
    ),
    "postgresql": (
        "generate_series(1, {rows}) AS s (n)",
        "gen_random_uuid()",
        "'q' || (n % 3)",
        "convert_to(repeat('x', 100), 'UTF8')",
    ),
    "mysql": (
        "(SELECT seq AS n FROM seq_1_to_{rows}) AS s",
        "unhex(md5(concat(n, uuid())))",
        "concat('q', n % 3)",
        "repeat('x', 100)",
    ),
}
LIVE = """
INSERT INTO millpond_message (id, queue, priority, due_at, state, payload, created_at)
SELECT {id}, {queue}, 50, {start} + n, CASE WHEN n % 1000 = 0 THEN 'RETRYABLE' ELSE 'PENDING' END, {payload}, n
FROM {series}
"""
ARCHIVED = """
INSERT INTO millpond_archive (id, queue, priority, due_at, state, payload, created_at, archived_at, deliveries,
attempts)
SELECT {id}, {queue}, 50, n, CASE WHEN n % 100 = 0 THEN 'FAILED' ELSE 'COMPLETED' END, {payload}, n,
{start} + n, 1, 1 FROM {series}
"""
READ_SO_FAR = {
    "postgresql": "SELECT coalesce(sum(seq_tup_read + idx_tup_fetch), 0)::bigint FROM pg_stat_xact_user_tables",
    "mysql": "SELECT sum(variable_value) FROM information_schema.session_status "
    "WHERE variable_name LIKE 'HANDLER_READ_%'",
}


def fill(name: str, text: str) -> Statement:
    series, id_, queue, payload = SERIES[name]
    return Statement(text.format(id=id_, queue=queue, payload=payload, start=START, series=series.format(rows=ROWS)))


@pytest.fixture(params=KINDS)
def url(request: pytest.FixtureRequest) -> str:
    """A new database, with tables as the migration made them."""
    return str(request.getfixturevalue(f"{request.param}_url"))


@pytest.fixture
async def store(url: str, connect: Callable[..., Any]) -> DatabaseStore:
    """On one connection: its first plans are the ones that are kept."""
    store: DatabaseStore = await connect(url, pool_size=1)
    return store


async def cost(store: DatabaseStore, steps: Steps[Any]) -> tuple[Any, int]:
    """The result of the steps and the number of rows that they read."""
    counted = 0

    def measured() -> Steps[tuple[Any, int]]:
        if store.dialect.name == "sqlite":
            return (yield from steps), counted
        read_so_far = Query(Statement(READ_SO_FAR[store.dialect.name]), {})
        before = (yield read_so_far)[0][0]
        nothing = (yield read_so_far)[0][0] - before  # this query itself reads
        before = (yield read_so_far)[0][0]
        result = yield from steps
        return result, int((yield read_so_far)[0][0] - before - nothing)

    def count() -> int:
        nonlocal counted
        counted += 1
        return 0

    if store.dialect.name == "sqlite":
        writer = store.runner.engine._writer  # type: ignore[attr-defined]
        await writer.call(lambda connection: connection.set_progress_handler(count, 10))
    result, read = await store.runner.engine.run(measured, Mode.WRITE)
    if store.dialect.name == "sqlite":
        await writer.call(lambda connection: connection.set_progress_handler(None, 0))
        read = counted  # in tens of steps; each row takes some
    return result, read


def verbs(store: DatabaseStore, live: list[Any], archived: list[Any]) -> dict[str, Callable[[], Steps[Any]]]:
    d = store.dialect
    page = {"key": None, "limit": 100}
    everything = {"states": [State.PENDING, State.RETRYABLE, State.PROCESSING], **page}
    settled = {"states": [State.COMPLETED, State.FAILED], "since": None, "until": None, **page}
    last, old = (live[-1].position if live else None), (archived[-1].position if archived else None)
    middle = (START + ROWS // 2, new_id())
    ids = [d.id_in(row.id) for row in [*live, *archived]] or [d.id_in(new_id())]
    unknown = [d.id_in(new_id()) for _ in range(100)]
    none = {"priority": None, "due": None, "delay": None, "attempts": 1}
    return {
        "browse": lambda: live_page(d, None, after=None, **everything),
        "browse on": lambda: live_page(d, None, after=last, **everything),
        "browse a queue": lambda: live_page(d, "q1", after=None, **everything),
        "browse on in a queue": lambda: live_page(
            d, "q1", after=("q1", False, 50, START + ROWS // 2, new_id()), **everything
        ),
        "browse in hand": lambda: live_page(d, None, after=None, states=[State.PROCESSING], **page),
        "archived": lambda: archived_page(d, None, after=None, **settled),
        "archived on": lambda: archived_page(d, None, after=old, **settled),
        "archived of a queue": lambda: archived_page(d, "q1", after=middle, **settled),
        "archived of a state": lambda: archived_page(d, None, after=None, **{**settled, "states": [State.FAILED]}),
        "archived between": lambda: archived_page(
            d, None, after=None, **{**settled, "since": START + 5000, "until": START + 6000}
        ),
        "queues": lambda: archived_queues(d),
        "find": lambda: find_rows(d, ids),
        "find nothing": lambda: find_rows(d, unknown),
        "reschedule": lambda: steps_of(store.operations._reschedule, ids, none),
        "reschedule nothing": lambda: steps_of(store.operations._reschedule, unknown, none),
        "cancel": lambda: store.operations._cancel(ids[:50], "x", again=True),
        "missing": lambda: not_archived(d, [row.id for row in archived] or [new_id()]),
        "replay": lambda: (
            publish_again(
                d,
                [row.id for row in archived],
                name="n",
                queue=None,
                now=None,
                dedupe_for=1,
                notify=False,
            )
            if archived
            else archived_queues(d)
        ),
        "forget ids": lambda: forget_ids(d, None, 5000),
    }


async def test_a_page_costs_a_page(store: DatabaseStore) -> None:
    for steps in verbs(store, [], []).values():
        await cost(store, steps())  # plans made while the tables are empty
    for text in (LIVE, ARCHIVED):
        await store.runner.engine.run(lambda text=text: _one(fill(store.dialect.name, text)))  # type: ignore[misc]
    live, archived = await store.operations.browse(), await store.operations.archived()
    assert len(live) == len(archived) == 100
    costs = {name: (await cost(store, steps()))[1] for name, steps in verbs(store, live, archived).items()}
    # A page reads its rows once or twice; SQLite takes some ten steps for each column of each.
    bound = 6000 if store.dialect.name == "sqlite" else 2000
    assert {name: read for name, read in costs.items() if read > bound} == {}, costs


async def test_a_purge_reads_what_it_deletes(store: DatabaseStore) -> None:
    """Also rare messages among many of another state."""
    d = store.dialect
    await cost(store, purge_some(d, {("q1", State.FAILED): 0}, {("q1", State.FAILED): START}, 100, PurgeCheck(d)))
    await store.runner.engine.run(lambda: _one(fill(d.name, ARCHIVED)))
    for state in (State.FAILED, State.COMPLETED):
        pair = ("q1", state)
        done, read = await cost(store, purge_some(d, {pair: 0}, {pair: START + ROWS}, 100, PurgeCheck(d)))
        assert done.rows == 100
        assert read < (6000 if d.name == "sqlite" else 2000)


def _one(statement: Statement) -> Steps[Any]:
    return (yield Query(statement, {}))
