"""Pages of the dashboard over many messages, against the database's own time for the queries that they need."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Any

import asyncpg
import httpx

import millpond
from bench.databases import COLUMNS, Database
from bench.http_client import HttpClient
from bench.measure import Measurement
from bench.scenario import Scenario, fresh
from bench.served import serving
from bench.side import ERROR, PAYLOAD, PRIORITY, QUEUE, now
from bench.sizes import Sizes
from bench.store_side import open_store
from millpond.clock import SECOND
from millpond.failed_attempts import fingerprint
from millpond.server.application import application
from millpond.server.state import ServerState

OTHERS = 9
"""Queues beside the one that has half of all messages."""
GROUPS = 50
"""Different errors."""
_FAILED_EACH = 50
"""One archived message of this number failed."""
_SPREAD = 3 * 3600 * SECOND
"""Time in which the archived messages were settled, which ends now."""
_APART = 1.1
"""Seconds between two overviews: the server counts once a second for all its callers."""

_QUEUE_OF_N = f"CASE WHEN n % 2 = 0 THEN '{QUEUE}' ELSE 'queue-' || (n / 2 % {OTHERS}) END"
_PENDING = f"""
INSERT INTO millpond_message ({COLUMNS}) SELECT lpad(to_hex(n), 32, '0')::uuid, {_QUEUE_OF_N}, $1::smallint,
$2::bigint + n, 'PENDING', $3::bytea, $2::bigint + n FROM generate_series(1, $4::bigint) n
"""
_ARCHIVED = f"""
INSERT INTO millpond_archive (id, created_at, due_at, first_attempt_at, last_attempt_at, acquired_at, archived_at,
token, deliveries, attempts, priority, queue, state, reason, error, failure, payload)
SELECT ('ffffffff' || lpad(to_hex(n), 24, '0'))::uuid, at - 2000000, at - 2000000, at - 1000, at, at - 1000, at,
n, 1, 1, $1::smallint, {_QUEUE_OF_N}, CASE WHEN kind IS NULL THEN 'COMPLETED' ELSE 'FAILED' END,
CASE WHEN kind IS NOT NULL THEN 'error' END, ($5::text[])[kind], ($6::bigint[])[kind], $3::bytea
FROM (SELECT n, $2::bigint - ($4::bigint - n) * ({_SPREAD} / $4::bigint) AS at,
CASE WHEN n % {_FAILED_EACH} = 0 THEN (n / {_FAILED_EACH} % {GROUPS} + 1)::int END AS kind
FROM generate_series(1, $4::bigint) n) s
"""
_SOME_FAILED = f"SELECT id FROM millpond_archive WHERE queue = '{QUEUE}' AND state = 'FAILED' LIMIT $1"
_SOME_PENDING = f"SELECT id FROM millpond_message WHERE queue = '{QUEUE}' LIMIT $1"

Recorded = list[tuple[str, tuple[Any, ...]]]
"""Queries with their values."""


async def server_pages(scenario: Scenario, database: Database, sizes: Sizes) -> list[Measurement]:
    """Each page is requested from a server process; between two requests its queries are run by hand."""
    pending, archived = sizes.pages_messages
    async with fresh(database) as url:
        await (await open_store(url)).close()
        connection = await asyncpg.connect(url)
        try:
            await _fill(connection, pending, archived)
            await database.tidy(url)
            paths = await _paths(connection, sizes.pages)
            found = []
            async with serving(url) as server, HttpClient(server.url) as http:
                for name, own in paths.items():
                    pause = _APART if name == "overview" and sizes.pages > 10 else 0.0
                    recorded = await _record(url, own)
                    pages, queries = await _take_turns(
                        [partial(_load, http, path) for path in own],
                        [partial(_run, connection, recorded[path]) for path in own],
                        pause,
                    )
                    found.append(_against_queries(scenario, name, pages, queries, (pending, archived)))
            return found
        finally:
            await connection.close()


async def _fill(connection: asyncpg.Connection, pending: int, archived: int) -> None:
    at = await connection.fetchval("SELECT (extract(epoch FROM clock_timestamp()) * 1000000)::bigint")
    await connection.execute(_PENDING, PRIORITY, at - pending - SECOND, PAYLOAD, pending)
    errors = [f"{ERROR} {chr(97 + n % 26)}{chr(97 + n // 26)}" for n in range(GROUPS)]
    fingerprints = [fingerprint("error", error) for error in errors]
    await connection.execute(_ARCHIVED, PRIORITY, at, PAYLOAD, archived, errors, fingerprints)


async def _paths(connection: asyncpg.Connection, number: int) -> dict[str, list[str]]:
    """Paths of each kind of page; those of messages are of different ones."""
    failed = [f"/messages/{row['id']}" for row in await connection.fetch(_SOME_FAILED, number)]
    waiting = [f"/messages/{row['id']}" for row in await connection.fetch(_SOME_PENDING, number)]
    pages = {
        "overview": [""] * number,
        "failures": ["/failures"] * number,
        "failed": ["/messages?state=FAILED"] * number,
        "failed-message": failed,
        "waiting-message": waiting,
    }
    return {name: [f"/dashboard{path}" for path in paths] for name, paths in pages.items()}


async def _record(url: str, paths: Sequence[str]) -> dict[str, Recorded]:
    """The queries that a server sends for each page, when its caches are empty."""
    queries: Recorded = []

    def add(query: asyncpg.connection.LoggedQuery) -> None:
        if query.query.split(None, 1)[0] in ("SELECT", "WITH", "(") and ";" not in query.query:
            queries.append((query.query, tuple(query.args)))

    async def prepare(connection: asyncpg.Connection) -> None:
        connection.add_query_logger(add)

    found: dict[str, Recorded] = {}
    async with asyncpg.create_pool(url, min_size=2, max_size=2, init=prepare) as pool:
        store = await millpond.connect("postgresql://", pool=pool)
        for path in dict.fromkeys(paths):
            state = ServerState(store)
            inside = httpx.ASGITransport(app=application(state))
            async with httpx.AsyncClient(transport=inside, base_url="http://127.0.0.1", timeout=600) as http:
                queries.clear()
                (await http.get(path)).raise_for_status()
                found[path] = list(queries)
            await state.close()
        await store.close()
    return found


async def _load(http: HttpClient, path: str) -> None:
    status, _ = await http.get(path)
    if status != 200:
        raise RuntimeError(f"{path}: {status}")


async def _run(connection: asyncpg.Connection, queries: Recorded) -> None:
    for query, values in queries:
        await connection.fetch(query, *values)


async def _take_turns(
    pages: Sequence[Callable[[], Awaitable[None]]], queries: Sequence[Callable[[], Awaitable[None]]], pause: float
) -> tuple[list[float], list[float]]:
    """Seconds of the pages and of their queries, one after the other. The first of each does not count."""
    took: tuple[list[float], list[float]] = [], []
    for turn in zip(pages, queries, strict=True):
        await asyncio.sleep(pause)
        for work, seconds in zip(turn, took, strict=True):
            began = now()
            await work()
            seconds.append(now() - began)
    return took[0][1:], took[1][1:]


def _against_queries(
    scenario: Scenario, name: str, pages: Sequence[float], queries: Sequence[float], messages: tuple[int, int]
) -> Measurement:
    ours, theirs = 1000 * _p95(pages), 1000 * _p95(queries)
    ratios = [page / query for page, query in zip(pages, queries, strict=True)]
    return Measurement(
        name=f"{scenario.name}-{name}",
        what=f"page, p95: {ours:.1f} ms",
        against=f"its queries by hand: {theirs:.1f} ms",
        value=ours / theirs,
        unit="ratio",
        low=min(ratios),
        high=max(ratios),
        at_most=scenario.bar,
        facts={"pending": messages[0], "archived": messages[1], "requests": len(pages)},
    )


def _p95(values: Sequence[float]) -> float:
    return sorted(values)[min(len(values) - 1, len(values) * 95 // 100)]
