"""The options of a database store, checked by name and value."""

from __future__ import annotations

import difflib
import ssl
from typing import Any

import msgspec

from millpond.clock import Clock, DatabaseClock, Seconds, micros
from millpond.errors import InvalidOption
from millpond.message import BODY_LIMIT

TRANSACTION_LIMIT = 1 << 30
IDLE_IN_TRANSACTION = 5
"""Seconds that a transaction of ours may wait for us before the server ends it: its locks are in others' way."""


class StoreOptions(msgspec.Struct, frozen=True, kw_only=True):
    """What `connect` takes beside the URL."""

    schema: str | None = None
    """The database schema (PostgreSQL) or database (MySQL) that holds the tables; default: the session's."""
    table_prefix: str = ""
    pool_size: int = 10
    """Connections at most. Not used with SQLite, which has one writer, nor with the caller's own pool."""
    pool: Any = None
    """The caller's own asyncpg pool, asyncmy pool or SQLAlchemy AsyncEngine; it is never closed by us."""
    tls: ssl.SSLContext | bool | None = None
    """True: encrypt, and check the server's certificate; or a context of the caller's own."""
    pooler: bool = False
    """Between us and PostgreSQL stands a pooler in transaction mode, such as PgBouncer."""
    notify: bool = True
    """Wake waiting workers by NOTIFY on PostgreSQL; without it they poll. Commits that notify go one by one."""
    body_limit: int = BODY_LIMIT
    dedupe_for: Seconds = 7 * 86_400
    """How long an id given by a caller is remembered after publishing."""
    busy_timeout: Seconds = 10
    """How long to wait for other people's locks before `StoreBusy`."""
    reconnect_timeout: Seconds = 30
    """How long to try again when the connection is lost before `StoreUnavailable`."""
    call_timeout: Seconds = 60
    """No call to the database takes longer; it fails like a lost connection."""
    migrate: bool | None = None
    """Create or update the tables on connecting; None: only in a new SQLite file."""
    clock: Clock = DatabaseClock()
    """Tests may give a ManualClock; otherwise the database's clock decides."""


def parse(given: dict[str, Any]) -> StoreOptions:
    """Check options by name, type and range."""
    names = StoreOptions.__struct_fields__
    for name in given:
        if name not in names:
            near = difflib.get_close_matches(name, names, 1)
            raise InvalidOption(
                f"unknown option {name!r}"
                + (f"; did you mean {near[0]!r}?" if near else f"; there are {', '.join(names)}")
            )
    options = StoreOptions(**given)
    if not isinstance(options.table_prefix, str) or not isinstance(options.schema, str | None):
        raise InvalidOption("schema and table_prefix must be text")
    # Not by truth: "no" would be true.
    if options.migrate not in (True, False, None):
        raise InvalidOption(f"migrate must be True, False or None, not {options.migrate!r}")
    if options.pooler not in (True, False):
        raise InvalidOption(f"pooler must be True or False, not {options.pooler!r}")
    if not isinstance(options.tls, ssl.SSLContext | bool | None):
        raise InvalidOption(f"tls must be True, False or an ssl.SSLContext, not {options.tls!r}")
    for name, low, high in (("pool_size", 1, 10_000), ("body_limit", 1, TRANSACTION_LIMIT)):
        value = getattr(options, name)
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            raise InvalidOption(f"{name} must be a whole number from {low} to {high:,}, not {value!r}")
    for name in ("dedupe_for", "busy_timeout", "reconnect_timeout", "call_timeout"):
        micros(getattr(options, name), name)
    return options
