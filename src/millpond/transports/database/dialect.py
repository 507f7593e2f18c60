"""What one database says differently from another: words in shared texts, a few whole texts, its errors."""

from __future__ import annotations

import hashlib
import re
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from enum import Enum, auto
from functools import cached_property
from typing import Any, ClassVar
from uuid import UUID

import msgspec

from millpond.errors import InvalidOption
from millpond.message import id_of
from millpond.transports.database.statement import Many, Statement, Step, Steps, Style
from millpond.transports.database.statements import KEEP_EACH, REQUEUE
from millpond.transports.database.stream_statements import NOTE

_IDENTIFIER = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,30}")


class Trouble(Enum):
    """What a driver's exception means to us."""

    BUSY = auto()
    """Deadlock, lock wait, serialization: the transaction did nothing; run it again."""
    LOST = auto()
    """The connection is gone; whether the last commit happened is unknown."""
    REFUSED = auto()
    """The database does not let this user in."""
    UNTRUSTED = auto()
    """No encrypted connection: a certificate that we do not trust, or no TLS at all."""
    NO_DATABASE = auto()
    """The server does not know the database."""
    UNMIGRATED = auto()
    """A table or column of ours is missing."""
    OTHER = auto()
    """The driver's, with no remedy that we know."""
    FOREIGN = auto()
    """Not the driver's at all."""


class Fused(msgspec.Struct, frozen=True, kw_only=True):
    """Texts of a database that locks, checks and writes in one statement over array parameters.

    Measured on PostgreSQL against the lock-then-write steps that others take: a third of the round trips.
    Those that settle answer with one row: how many were written, and their ids unless that was all.
    """

    insert: str
    insert_and_announce: str
    announce: str
    claim_lane: str
    claim_only: str
    claim_ids: str
    extend: str
    moves: Mapping[tuple[bool, bool], str]
    move_each: Mapping[bool, str]
    requeues: Mapping[bool, str]

    def move(self, *, keep: bool, wait: bool) -> str:
        return self.moves[keep, wait]

    def requeue(self, *, wait: bool) -> str:
        return self.requeues[wait]


class Dialect(ABC):
    """The words of one database. Subclasses fill in; nothing here runs a statement."""

    name: ClassVar[str]
    style: ClassVar[Style]
    """The parameter style of our own driver."""
    fused: ClassVar[Fused | None] = None
    """Whole operations in one statement, where the database can."""
    sole_writer: ClassVar[bool] = False
    """Whoever is in a write transaction is alone in it: what it checked stays so without locks."""
    no_floor: ClassVar[tuple[int, Any]] = (-(2**63), None)
    """Below every message, also those due before 1970."""
    day_partitions: ClassVar[bool] = False
    """The archive has a partition for each day, which purge can drop whole."""
    tick: ClassVar[float] = 0.0
    """Seconds in which the database's clock may stand still, if that is longer than a call takes."""
    grace: ClassVar[float] = 1.0
    """Seconds in which a statement that the server has received, and with it the time of, shows itself to `late`."""
    archive_by_time: ClassVar[bool] = False
    """The archive's rows lie in the order of archiving."""
    words: ClassVar[Mapping[str, str]]
    overrides: ClassVar[Mapping[str, str]] = {}
    """Shared text -> this database's own, each with its reason beside it."""

    TABLES = (
        *("message", "archive", "dedupe", "once", "queue", "worker", "migration"),
        *("stream", "stream_claim", "stream_message"),
        *("lot", "staging", "written", "export"),
    )

    def __init__(self, *, schema: str | None = None, prefix: str = "") -> None:
        for what, value in (("schema", schema), ("table_prefix", prefix or None)):
            if value is not None and not _IDENTIFIER.fullmatch(value):
                raise InvalidOption(
                    f"{what} {value!r} must begin with a letter or _ and hold at most 31 letters, digits and _"
                )
        self.schema = schema
        self.prefix = prefix
        self._statements: dict[str, Statement] = {}
        database = f"'{schema}'" if schema else "database()"
        self._words = {
            **{w: text.replace("{prefix}", prefix).replace("{database}", database) for w, text in self.words.items()},
            **{table: self.qualified(self.table(table)) for table in self.TABLES},
            "archive_default": self.qualified(f"{self.table('archive')}_default"),
            "database": database,
            "prefix": prefix,
            "schema_dot": self.quote(schema) + "." if schema else "",
        }

    def table(self, name: str) -> str:
        """The bare name of one of our tables."""
        return f"{self.prefix}{'message_archive' if name == 'archive' else _TABLE_NAMES.get(name, name)}"

    def qualified(self, table: str) -> str:
        return f"{self.quote(self.schema)}.{self.quote(table)}" if self.schema else self.quote(table)

    def quote(self, identifier: str) -> str:
        return f'"{identifier}"'

    def sql(self, text: str) -> Statement:
        """A shared text in this database's words."""
        statement = self._statements.get(text)
        if statement is None:
            statement = self._statements[text] = Statement(self.fill(self.overrides.get(text, text)))
        return statement

    @cached_property
    def channel(self) -> str:
        """Where publishers announce and workers listen: one for each set of tables, short whatever their names."""
        return f"millpond_{hashlib.sha256(f'{self.schema}.{self.prefix}'.encode()).hexdigest()[:16]}"

    def fill(self, text: str) -> str:
        return text.format_map(self._words)

    def id_in(self, value: UUID) -> Any:
        """An id as this database's drivers take it."""
        return value.int.to_bytes(16, "big")

    def id_out(self, value: Any) -> UUID:
        return id_of(value)

    @abstractmethod
    def probe(self, params: dict[str, Any], gaps: Sequence[tuple[int, int]], floors: Sequence[Any]) -> Step:
        """Ask which lanes to look at: those of `gaps` (low, high) that are one lane and have something due at
        or above their floor, and the lowest lane that has anything in each of the others."""

    def requeue(self, params: dict[str, Any], rows: Sequence[tuple[Any, int | None, str | None]]) -> Step:
        """Put (id, delay, error) back to waiting, in the fastest way there is."""
        shared = tuple(params.values())
        return Many(
            self.sql(REQUEUE),
            (*params, "id", "delay", "error"),
            [(*shared, id_, delay, error) for id_, delay, error in rows],
        )

    def keep_each(self, params: dict[str, Any], rows: Sequence[tuple[Any, str | None, str | None]]) -> Step:
        """Copy (id, reason, error) into the archive, in the fastest way there is."""
        shared = tuple(params.values())
        return Many(
            self.sql(KEEP_EACH),
            (*params, "id", "reason", "error"),
            [(*shared, id_, reason, error) for id_, reason, error in rows],
        )

    def note_outcomes(self, params: dict[str, Any], rows: Sequence[tuple[Any, str, int | None, str | None]]) -> Step:
        """Note (id, outcome, delay, reason) beside the messages of a stream's claim, in the fastest way there is."""
        shared = tuple(params.values())
        return Many(self.sql(NOTE), (*params, "id", "outcome", "delay", "reason"), [(*shared, *row) for row in rows])

    def late(self, low: int, at: int) -> Steps[dict[str, int]]:
        """Who has archived something from `low` on and before `at`, and has not committed it: of each, and be it by a
        guess that is too early, since when. Nothing to ask where whoever writes is alone."""
        yield from ()
        return {}

    @abstractmethod
    def trouble(self, error: BaseException) -> Trouble:
        """What a driver's exception means."""

    def is_missing_table(self, error: BaseException) -> bool:
        return self.trouble(error) is Trouble.UNMIGRATED

    def prelude(self) -> Sequence[str]:
        """Statements before the first migration; each may run again."""
        return (
            "CREATE TABLE IF NOT EXISTS {migration} "
            "(version INTEGER NOT NULL PRIMARY KEY, name VARCHAR(100) NOT NULL, applied_at BIGINT NOT NULL)",
        )

    def lock_migrations(self) -> Steps[None]:
        """Let one process migrate at a time. Nothing to do where a transaction does it."""
        yield from ()

    def unlock_migrations(self) -> Steps[None]:
        yield from ()


_TABLE_NAMES = {
    "dedupe": "message_dedupe",
    "once": "message_once",
    "queue": "message_queue",
    "worker": "message_worker",
    "migration": "message_migration",
    "stream": "message_stream",
    "stream_claim": "message_stream_claim",
    "stream_message": "message_stream_message",
    "lot": "message_lot",
    "staging": "message_staging",
    "written": "message_written",
    "export": "message_export",
}
"""Small tables carry `message_` too, since they live in the schema of somebody's application."""
