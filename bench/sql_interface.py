"""SQL as an interface on PostgreSQL: functions against the store, and the publishing view against a bare table."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import asyncpg

from bench.databases import Database
from bench.measure import Measurement, Work, ratio, take_turns
from bench.scenario import Scenario, fresh
from bench.side import LEASE, PAYLOAD, QUEUE, drain_overlapping, now
from bench.sizes import Sizes
from bench.store_side import open_store
from millpond.table_prefix import TABLE_PREFIX

STORE = "store_"
"""Prefix of the tables that the store works on; the functions work on those of the default prefix."""
_BARE = f"CREATE TABLE bare (LIKE {TABLE_PREFIX}message INCLUDING ALL)"
# Ids grow as those of the view do: random ones would be slower to index.
_INTO_BARE = """
INSERT INTO bare (id, queue, priority, payload, due_at, state, created_at)
SELECT (lpad(to_hex(t.at), 16, '0') || lpad(to_hex(n), 16, '0'))::uuid, $1::text, 50,
convert_to($2::text, 'UTF8'), t.at, 'PENDING', t.at FROM generate_series(1, $3::int) n,
(SELECT (extract(epoch FROM statement_timestamp()) * 1000000)::bigint AS at) t
"""
_INTO_VIEW = f"""
INSERT INTO {TABLE_PREFIX}publish (queue, body) SELECT $1::text, $2::text FROM generate_series(1, $3::int)
"""


async def sql_drain(scenario: Scenario, database: Database, sizes: Sizes) -> list[Measurement]:
    """Claim and ack by functions, and the same by the store, in turns."""
    sql_took, store_took = [], []
    part = sizes.drain // sizes.slices
    for _ in range(sizes.rounds):
        async with fresh(database) as url:
            store, ours = await open_store(url, STORE), await open_store(url)
            for prefix in (TABLE_PREFIX, STORE):
                await database.fill(url, prefix, 1, part * sizes.slices)
            await database.tidy(url)
            claimer, acker = await asyncpg.connect(url), await asyncpg.connect(url)
            turns: dict[str, Work] = {
                "sql": partial(_drain, claimer, acker, part, sizes.batch),
                "store": partial(store.drain, part, sizes.batch),
            }
            seconds = await take_turns(turns, sizes.slices)
            for opened in (claimer, acker, store, ours):
                await opened.close()
        sql_took.append(sum(seconds["sql"]))
        store_took.append(sum(seconds["store"]))
    what = f"drain by SQL functions, batches of {sizes.batch}"
    done = part * sizes.slices
    return [ratio(scenario.name, what, "the store", sql_took, store_took, done, at_least=scenario.bar)]


async def _drain(claimer: Any, acker: Any, count: int, batch: int) -> float:
    async def claim() -> Sequence[Any]:
        rows: Sequence[Any] = await claimer.fetch(
            f"SELECT * FROM {TABLE_PREFIX}claim($1, $2, $3)", QUEUE, batch, float(LEASE)
        )
        return rows

    async def ack(rows: Sequence[Any]) -> None:
        ids = [row[0] for row in rows]
        if await acker.fetch(f"SELECT {TABLE_PREFIX}ack_many($1, $2)", ids, rows[0][1]):
            raise RuntimeError("a receipt was refused")

    return await drain_overlapping(claim, ack, count)


async def sql_insert(scenario: Scenario, database: Database, sizes: Sizes) -> list[Measurement]:
    """One statement with many rows, into the view and into a table with the same columns and indexes."""
    view_took, bare_took = [], []
    count = 20 * sizes.bulk
    for _ in range(sizes.rounds):
        async with fresh(database) as url:
            await (await open_store(url)).close()
            connection = await asyncpg.connect(url)
            await connection.execute(_BARE)
            turns: dict[str, Work] = {
                "view": partial(_insert, connection, _INTO_VIEW, count),
                "bare": partial(_insert, connection, _INTO_BARE, count),
            }
            seconds = await take_turns(turns, 2)
            await connection.close()
        view_took.append(sum(seconds["view"]))
        bare_took.append(sum(seconds["bare"]))
    what = f"INSERT of {count:,} rows through the view"
    return [ratio(scenario.name, what, "a bare table", view_took, bare_took, 2 * count, at_least=scenario.bar)]


async def _insert(connection: Any, text: str, count: int) -> float:
    began = now()
    await connection.execute(text, QUEUE, PAYLOAD.decode(), count)
    return now() - began
