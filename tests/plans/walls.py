"""Rows ahead of a claim, hundreds of thousands, made inside the database."""

from collections.abc import Iterator
from dataclasses import dataclass

from millpond.clock import SECOND, SystemClock

QUEUE = "orders"
LANE, URGENT = 50, 10
DUE = 1_000
"""Messages of QUEUE and LANE that may be claimed."""
LAPSED = 500
OTHER_QUEUES = 300_000
FUTURE = 60_000
ARCHIVED = 60_000
IN_FLIGHT = 20_000

_LIVE = (
    "INSERT INTO millpond_message (id, queue, priority, due_at, state, payload, created_at, deliveries, "
    "attempts, acquired_at, lease_until, token) SELECT {id}, {queue}, {lane}, {due}, '{state}', {payload}, "
    "{now}, {deliveries}, 0, {acquired}, {lease}, {token} FROM {series}"
)
_ARCHIVED = (
    "INSERT INTO millpond_archive (id, queue, priority, due_at, state, payload, created_at, deliveries, "
    "attempts, acquired_at, token, archived_at) SELECT {id}, {queue}, {lane}, {now}, 'COMPLETED', {payload}, {now}, "
    "1, 1, {now}, 1, {now} - n FROM {series}"
)


@dataclass(frozen=True)
class Words:
    """The SQL with which a database counts from `first` to `last` and makes an id from the number `n`."""

    id: str
    series: str
    payload: str
    other_queue: str
    begin: str = ""
    """Text before the INSERT, if a series needs it."""


POSTGRES = Words(
    id="lpad(to_hex(n), 32, '0')::uuid",
    series="generate_series({first}, {last}) AS s(n)",
    payload="'{}'::bytea",
    other_queue="'other-' || (n % 10)",
)
MARIADB = Words(
    id="CAST(LPAD(n, 16, '0') AS BINARY)",
    series="(SELECT seq AS n FROM seq_{first}_to_{last}) AS s",
    payload="'{}'",
    other_queue="concat('other-', n % 10)",
)
SQLITE = Words(
    id="CAST(printf('%016d', n) AS BLOB)",
    series="s",
    payload="CAST('{}' AS BLOB)",
    other_queue="'other-' || (n % 10)",
    begin="WITH RECURSIVE s(n) AS (SELECT {first} UNION ALL SELECT n + 1 FROM s WHERE n < {last}) ",
)


def statements(words: Words) -> Iterator[str]:
    """INSERTs of all rows; the messages to be claimed come last."""
    now = SystemClock().now()
    soon, past = now + 3600 * SECOND, now - 3600 * SECOND
    first = 1

    def rows(text: str, count: int, **values: object) -> str:
        nonlocal first
        last = first + count - 1
        found = {
            "id": words.id,
            "payload": words.payload,
            "queue": f"'{QUEUE}'",
            "lane": LANE,
            "now": now,
            "state": "PENDING",
            "deliveries": 0,
            **dict.fromkeys(("acquired", "lease", "token"), "NULL"),
            **values,
            "series": words.series.format(first=first, last=last),
        }
        begin = words.begin.format(first=first, last=last)
        first = last + 1
        return begin + text.format(**found)

    claimed = {"state": "PROCESSING", "deliveries": 1, "acquired": now, "token": "n", "due": f"{past} + n"}
    yield rows(_LIVE, OTHER_QUEUES, queue=words.other_queue, due=f"{past} + n")
    yield rows(_LIVE, FUTURE, due=f"{soon} + n")
    yield rows(_LIVE, FUTURE, lane=URGENT, due=f"{soon} + n")
    yield rows(_ARCHIVED, ARCHIVED)
    yield rows(_LIVE, IN_FLIGHT, **claimed, lease=f"{soon} + n")
    yield rows(_LIVE, LAPSED, **claimed, lease=f"{past} + n")
    yield rows(_LIVE, DUE, due=f"{past} + n")
