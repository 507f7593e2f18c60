"""The options of a database store, checked by name and value; its TLS context and timeouts."""

from __future__ import annotations

import ssl
from typing import Any, Literal

import msgspec

from millpond.checks import check_clock, integer, known_options
from millpond.clock import SECOND, Clock, DatabaseClock, Seconds, micros
from millpond.errors import InvalidOption, InvalidURL
from millpond.message import BODY_LIMIT, LARGEST_BODY_LIMIT
from millpond.table_prefix import TABLE_PREFIX
from millpond.transports.tls import truth
from millpond.transports.url import Url

_CONNECT_TIMEOUT = 10.0
IDLE_IN_TRANSACTION = 5
"""Seconds that our transaction may wait for us before the server ends it, because its locks block others."""


class StoreOptions(msgspec.Struct, frozen=True, kw_only=True):
    """The options of `connect` for a database."""

    schema: str | None = None
    """The database schema (PostgreSQL) or database (MySQL) that holds the tables; default: the session's."""
    table_prefix: str = TABLE_PREFIX
    """Prefix of the names of all tables and functions."""
    pool_size: int = 10
    """Maximum number of connections. Not used with SQLite, which has one writer, nor with the caller's own pool."""
    pool: Any = None
    """The caller's own asyncpg pool, asyncmy pool or SQLAlchemy AsyncEngine; it is never closed by us."""
    tls: ssl.SSLContext | bool | None = None
    """True: encrypt, and check the server's certificate; or the caller's own context."""
    pooler: bool = False
    """True if connections pass a pooler in transaction mode, such as PgBouncer."""
    notify: bool = True
    """Wake waiting workers by NOTIFY on PostgreSQL; without it they poll. Commits that notify go one by one."""
    body_limit: int = BODY_LIMIT
    dedupe_for: Seconds = 7 * 86_400
    """Time for which an id given by a caller is remembered after publishing."""
    busy_timeout: Seconds = 10
    """Time to wait for locks of other transactions before `StoreBusy`."""
    reconnect_timeout: Seconds = 30
    """Time to try again after a lost connection before `StoreUnavailable`."""
    call_timeout: Seconds = 60
    """A call to the database that takes longer fails like a lost connection."""
    migrate: bool | Literal["rename"] | None = None
    """Create or update the tables on connecting; None: only in a new SQLite file. "rename": also replace the table
    names of the earlier layout."""
    clock: Clock = DatabaseClock()
    """Tests may give a ManualClock; otherwise the database's clock decides."""


def parse(given: dict[str, Any]) -> StoreOptions:
    """Check options by name, type and range."""
    known_options(given, StoreOptions.__struct_fields__)
    options = StoreOptions(**given)
    if not isinstance(options.table_prefix, str) or not isinstance(options.schema, str | None):
        raise InvalidOption("schema and table_prefix must be text")
    # Not by truth: "no" would be true.
    if options.migrate not in (True, False, None, "rename"):
        raise InvalidOption(f"migrate must be True, False, None or 'rename', not {options.migrate!r}")
    for name in ("pooler", "notify"):
        if getattr(options, name) not in (True, False):
            raise InvalidOption(f"{name} must be True or False, not {getattr(options, name)!r}")
    check_clock(options.clock)
    if not isinstance(options.tls, ssl.SSLContext | bool | None):
        raise InvalidOption(f"tls must be True, False or an ssl.SSLContext, not {options.tls!r}")
    integer(options.pool_size, "pool_size", 1, 10_000)
    integer(options.body_limit, "body_limit", 1, LARGEST_BODY_LIMIT)
    for name in ("dedupe_for", "busy_timeout", "reconnect_timeout", "call_timeout"):
        micros(getattr(options, name), name)
    return options


def call_timeout(options: StoreOptions) -> float:
    return micros(options.call_timeout, "call_timeout") / SECOND


def connect_timeout(options: StoreOptions) -> float:
    return min(_CONNECT_TIMEOUT, call_timeout(options))


def tls_context(url: Url, options: StoreOptions) -> ssl.SSLContext | None:
    """Read the option, or `ssl=true&ssl_ca=…&ssl_cert=…&ssl_key=…` of the URL, the names of MySQL's tools."""
    query = {name: value for name, value in url.query.items() if name.startswith("ssl")}
    if options.tls is not None:
        if query:
            raise InvalidOption("give either the option tls or ssl parameters in the URL, not both")
        return ssl.create_default_context() if options.tls is True else options.tls or None
    if "ssl_key" in query and "ssl_cert" not in query:
        raise InvalidURL(f"ssl_key of the URL {url} needs ssl_cert")
    if not truth(url, "ssl", bool(query)):
        if len(query) > 1:
            raise InvalidURL(f"ssl=false in the URL {url} contradicts its other ssl parameters; leave one out")
        return None
    try:
        context = ssl.create_default_context(cafile=query.get("ssl_ca"))
        if "ssl_cert" in query:
            context.load_cert_chain(query["ssl_cert"], query.get("ssl_key"))
    except (ssl.SSLError, OSError) as e:
        raise InvalidURL(f"the certificates that the URL {url} names cannot be read: {e}") from e
    return context


def is_untrusted(error: BaseException | None) -> bool:
    """Whether a handshake failed permanently, not because the connection was closed in its middle."""
    return isinstance(error, ssl.SSLError) and not isinstance(error, ssl.SSLEOFError | ssl.SSLZeroReturnError)
