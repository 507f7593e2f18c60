"""Reading the archive: our batch source against Spark's JDBC reader, on the same table."""

import time
from collections.abc import Callable
from typing import Any

import psycopg

from bench.measure import Measurement, Work, ratio, take_turns
from bench.spark.ground import PAYLOAD, Ground

BAR = 0.95
PARTS = 2
WARM_UP = 3
"""Rounds that do not count: Java goes on compiling what both sides run for about so many."""
SOME = ("id", "queue", "state", "archived_at")
# As workers leave them: due at once, and done at the first attempt.
FILL = f"""
INSERT INTO message_archive (id, queue, key, priority, due_at, payload, deliveries, attempts, created_at,
first_attempt_at, last_attempt_at, acquired_at, token, state, archived_at)
SELECT gen_random_uuid(), 'bench', 'key-' || n %% 1000, 50, created, convert_to(repeat('x', {PAYLOAD}), 'UTF8'), 1, 1,
created, acquired, now, acquired, n, 'COMPLETED', now
FROM (SELECT n, now, now - 900000 - n %% 1000 AS created, now - n %% 9000 AS acquired
FROM generate_series(1, %s) n, (SELECT (extract(epoch FROM now()) * 1000000)::bigint AS now) t) m
"""


async def batch(ground: Ground, rows: int, rounds: int) -> list[Measurement]:
    """Each reads every column, or four of them, into nothing."""
    leaf, pages = fill(ground, rows)
    works = {
        "ours": _work(lambda: _ours(ground)),
        "theirs": _work(lambda: jdbc(ground, leaf, pages, "*")),
        "ours, some": _work(lambda: _ours(ground, columns=",".join(SOME))),
        "theirs, some": _work(lambda: jdbc(ground, leaf, pages, *SOME)),
    }
    warm_up = min(rounds, WARM_UP)
    took = await take_turns(works, warm_up + rounds)
    ground.execute("TRUNCATE message_archive")
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


def fill(ground: Ground, rows: int) -> tuple[str, int]:
    """Returns the partition that holds them, and its pages."""
    with psycopg.connect(ground.url, autocommit=True) as connection:
        connection.execute(FILL, (rows,))
        connection.execute("VACUUM ANALYZE message_archive")
        found = connection.execute(
            "SELECT i.inhrelid::regclass::text, pg_relation_size(i.inhrelid) / current_setting('block_size')::int "
            "FROM pg_inherits i WHERE i.inhparent = 'message_archive'::regclass AND pg_relation_size(i.inhrelid) > 0"
        ).fetchone()
    assert found is not None
    return found


def _work(read: Callable[[], Any]) -> Work:
    async def timed() -> float:
        began = time.monotonic()
        read().write.format("noop").mode("overwrite").save()
        return time.monotonic() - began

    return timed


def _ours(ground: Ground, **options: str) -> Any:
    reader = ground.spark.read.format("millpond").options(url=ground.url, table="archive", **options)
    return reader.option("minPartitions", PARTS).load()


def jdbc(ground: Ground, leaf: str, pages: int, *columns: str) -> Any:
    half = pages // PARTS
    ranges = [f"ctid < '({half},0)'", f"ctid >= '({half},0)'"]
    options = ground.jdbc(rewrite=False)
    return ground.spark.read.jdbc(
        options["url"],
        leaf,
        predicates=ranges,
        properties={name: options[name] for name in ("user", "password", "driver")} | {"fetchsize": "10000"},
    ).select(*columns)
