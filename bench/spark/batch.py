"""Reading the archive: our batch source against Spark's JDBC reader, on the same table."""

import time
from collections.abc import Callable
from typing import Any

import psycopg

from bench.measure import Measurement, Work, ratio, take_turns
from bench.spark.setup import PAYLOAD, Setup

BAR = 0.95
PARTS = 2
WARM_UP = 3
"""Rounds that do not count: Java compiles the code of both sides for about that many."""
SOME = ("id", "queue", "state", "archived_at")
# Typical archived messages: due at once, acked at the first attempt.
FILL = f"""
INSERT INTO millpond_archive (id, queue, key, priority, due_at, payload, deliveries, attempts, created_at,
first_attempt_at, last_attempt_at, acquired_at, token, state, archived_at)
SELECT gen_random_uuid(), 'bench', 'key-' || n %% 1000, 50, created, convert_to(repeat('x', {PAYLOAD}), 'UTF8'), 1, 1,
created, acquired, now, acquired, n, 'COMPLETED', now
FROM (SELECT n, now, now - 900000 - n %% 1000 AS created, now - n %% 9000 AS acquired
FROM generate_series(1, %s) n, (SELECT (extract(epoch FROM now()) * 1000000)::bigint AS now) t) m
"""


async def batch(setup: Setup, rows: int, rounds: int) -> list[Measurement]:
    """Each side reads every column, or four of them, and discards the rows."""
    leaf, pages = fill(setup, rows)
    works = {
        "ours": _work(lambda: _ours(setup)),
        "theirs": _work(lambda: jdbc(setup, leaf, pages, "*")),
        "ours, some": _work(lambda: _ours(setup, columns=",".join(SOME))),
        "theirs, some": _work(lambda: jdbc(setup, leaf, pages, *SOME)),
    }
    warm_up = min(rounds, WARM_UP)
    took = await take_turns(works, warm_up + rounds)
    setup.execute("TRUNCATE millpond_archive")
    against = "JDBC by ranges of pages, fetchsize 10,000"
    return [
        ratio(
            f"spark-batch{'-some' if some else ''}",
            f"read of {rows:,} archived messages, {'four columns' if some else 'every column'}",
            against,
            took[f"ours{some}"][warm_up:],
            took[f"theirs{some}"][warm_up:],
            rows,
            at_least=None if some else BAR,
        )
        for some in ("", ", some")
    ]


def fill(setup: Setup, rows: int) -> tuple[str, int]:
    """Fill the archive; returns the partition that holds the rows, and its number of pages."""
    with psycopg.connect(setup.url, autocommit=True) as connection:
        connection.execute(FILL, (rows,))
        connection.execute("VACUUM ANALYZE millpond_archive")
        found = connection.execute(
            "SELECT i.inhrelid::regclass::text, pg_relation_size(i.inhrelid) / current_setting('block_size')::int "
            "FROM pg_inherits i WHERE i.inhparent = 'millpond_archive'::regclass AND pg_relation_size(i.inhrelid) > 0"
        ).fetchone()
    assert found is not None
    return found


def _work(read: Callable[[], Any]) -> Work:
    async def timed() -> float:
        began = time.monotonic()
        read().write.format("noop").mode("overwrite").save()
        return time.monotonic() - began

    return timed


def _ours(setup: Setup, **options: str) -> Any:
    reader = setup.spark.read.format("millpond").options(url=setup.url, table="archive", **options)
    return reader.option("minPartitions", PARTS).load()


def jdbc(setup: Setup, leaf: str, pages: int, *columns: str) -> Any:
    half = pages // PARTS
    ranges = [f"ctid < '({half},0)'", f"ctid >= '({half},0)'"]
    options = setup.jdbc(rewrite=False)
    return setup.spark.read.jdbc(
        options["url"],
        leaf,
        predicates=ranges,
        properties={name: options[name] for name in ("user", "password", "driver")} | {"fetchsize": "10000"},
    ).select(*columns)
