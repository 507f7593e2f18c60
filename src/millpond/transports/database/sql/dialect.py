"""The differences between databases: words in shared texts, a few whole texts, error codes.

Words of shared texts: `{message}` and the other tables; `{now}`, the database's clock in microseconds, or `:now` if a
test gives it; `{ready}`, may be claimed; `{locked}`, lock these rows and skip those locked by another transaction;
`{ids}`, is one of `:ids`; `{in_select} … {end_select}`, is one of the selected, searched from these, not from the
messages; `{inner}`, a join that does the same. The other words are in `words` of each dialect.
"""

from __future__ import annotations

import hashlib
import re
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Mapping, Sequence
from enum import Enum, auto
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar
from uuid import UUID

from millpond.errors import InvalidOption
from millpond.message import State, id_of
from millpond.table_prefix import TABLE_PREFIX
from millpond.transports.database.sql.function_texts import function_texts
from millpond.transports.database.sql.statement import Many, Query, Statement, Step, Steps, Style

if TYPE_CHECKING:
    from millpond.seam.diagnosis import Finding
    from millpond.transports.database.exports.ranges import PurgeCheck
    from millpond.transports.database.sql.transaction_marks import Marks
    from millpond.transports.database.sql.writes import Writes

_IDENTIFIER = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,30}")
CACHED_STATEMENTS = 1000
"""Ours are some hundreds. Probes of MySQL have a text for each pattern of priorities, which publishers choose."""


class ErrorKind(Enum):
    """The meaning of a driver's exception."""

    BUSY = auto()
    """Deadlock, lock wait, serialization: the transaction did nothing; run it again."""
    DUPLICATE = auto()
    """A unique value exists, perhaps by a lost try of the same publish whose commit came late; run it again."""
    DATA = auto()
    """A value is refused: too long, of a wrong type, or against a constraint. No later try can succeed."""
    LOST = auto()
    """The connection is gone; whether the last commit happened is unknown."""
    REFUSED = auto()
    """The database refuses the login."""
    DENIED = auto()
    """The account lacks a right on a table or function."""
    UNTRUSTED = auto()
    """No encrypted connection: a certificate that is not trusted, or no TLS."""
    NO_DATABASE = auto()
    """The server does not know the database."""
    UNMIGRATED = auto()
    """A table or column of Millpond is missing."""
    OTHER = auto()
    """An error of the driver without a known remedy."""
    FOREIGN = auto()
    """Not an error of the driver."""


class Named(str):
    """A shared text that a dialect may replace, by its name. A longer text that contains it is not replaced."""

    name: str
    known: ClassVar[set[str]] = set()

    def __new__(cls, name: str, text: str) -> Named:
        self = super().__new__(cls, text)
        self.name = name
        cls.known.add(name)
        return self


RunSteps = Callable[[Callable[[], Steps[Any]]], Awaitable[Any]]
Floor = tuple[int, Any]
"""Due time and id, as the database takes them: the place in a lane where the last claim ended."""
Pair = tuple[str, State]
"""Queue and state of archived messages."""
Cutoffs = Mapping[Pair, int]
"""Queue and state -> the time up to which its archived messages may be deleted."""

NOW = "SELECT {now}"
RELATIONS = "{relations}"
"""The names of tables, views and indexes where this store's tables are. `:schema`: None is the session's."""
ROUTINES = "{routines}"
"""The names of functions, procedures and triggers there. On PostgreSQL triggers belong to tables."""
REMOVE = "DELETE FROM {message} WHERE id {ids}"

# The lanes of a queue that a claim must visit: known lanes with a message due at or above their floor, and the lowest
# lane that has any message in each gap between them. Each is one descent of the index, so a wall of future or of
# more urgent messages costs nothing.
PROBE = """
SELECT CASE WHEN g.low = g.high
  THEN (SELECT m.lane FROM {message} m {claim_index} WHERE m.queue = :queue AND {ready} AND m.lane = g.low
        AND m.due_at <= {now} {above_floor} ORDER BY m.due_at, m.id LIMIT 1)
  ELSE (SELECT m.lane FROM {message} m {claim_index} WHERE m.queue = :queue AND {ready}
        AND m.lane >= g.low AND m.lane <= g.high ORDER BY m.lane LIMIT 1)
  END
FROM {gaps}
"""

# From queue to queue by the index, not through millions of rows.
FIRST_ARCHIVED_QUEUE = "SELECT min(a.queue) FROM {archive} a {archive_index}"
ARCHIVED_QUEUES = Named(
    "archived queues",
    """
WITH RECURSIVE step (name) AS (
SELECT min(a.queue) FROM {archive} a {archive_index} WHERE a.queue > :after
UNION ALL
SELECT (SELECT min(a.queue) FROM {archive} a {archive_index} WHERE a.queue > step.name) FROM step
WHERE step.name IS NOT NULL)
SELECT name FROM step WHERE name IS NOT NULL
""",
)


class Dialect(ABC):
    """The words of one database. It makes statements and runs none."""

    name: ClassVar[str]
    style: ClassVar[Style]
    """The parameter style of the driver for our connections."""
    error_aborts: ClassVar[bool] = False
    """After an error a transaction can only be rolled back."""
    no_floor: ClassVar[Floor] = (-(2**63), None)
    """A floor below every message, also those due before 1970."""
    tick: ClassVar[float] = 0.0
    """Resolution of the database's clock in seconds, if that is longer than a call."""
    grace: ClassVar[float] = 1.0
    """Seconds until `late` can see a statement that the server has received. 0 where no transaction can be late."""
    least_grace: ClassVar[float] = 0.0
    """Seconds of it that pass in any case, however old the rows are."""
    has_notifications: ClassVar[bool] = False
    """A publish wakes waiting workers of other processes, also that of a message that is due later."""
    marks: Marks | None = None
    """Finds waiting messages by the transactions that wrote them; None where there are no such marks."""
    and_locks_archive: ClassVar[str] = ""
    """A condition that is always true, and locks the archive as `lock_archive` does, in the statement itself."""
    words: ClassVar[Mapping[str, str]]
    largest_body: int | None = None
    """Bytes of the largest body that a statement can carry for certain; None where only the column limits it."""
    overrides: ClassVar[Mapping[str, str]] = {}
    """Name of a shared text -> this database's own text, with the reason beside it."""

    TABLES = (
        *("message", "archive", "dedupe", "once", "queue", "worker", "migration", "unique", "periodic", "cancel"),
        *("stream", "stream_claim", "stream_message"),
        *("lot", "staging", "written", "export", "export_range", "retried", "step", "token", "audit"),
        *("shard", "moving", "incoming", "moved"),
    )

    def __init__(self, *, schema: str | None = None, prefix: str = TABLE_PREFIX) -> None:
        for what, value in (("schema", schema), ("table_prefix", prefix)):
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
            "channel": self.channel,
            "schema_dot": self.quote(schema) + "." if schema else "",
            **{name: self.qualified(f"{prefix}{name}") for name in ("publish", "message_view", "archive_view")},
        }
        self._words |= {"own": f"{self._words['schema_dot']}{prefix}", **function_texts(self._words)}

    def table(self, name: str) -> str:
        """The name of a table, without schema and quotes."""
        return f"{self.prefix}{name}"

    def qualified(self, table: str) -> str:
        return f"{self.quote(self.schema)}.{self.quote(table)}" if self.schema else self.quote(table)

    def quote(self, identifier: str) -> str:
        return f'"{identifier}"'

    def is_named(self, found: str, named: str) -> bool:
        """Whether a database that has this name for itself may be the one that a URL names so."""
        return found == named

    @property
    @abstractmethod
    def writes(self) -> Writes:
        """How this database takes batches: `OneStatement` on PostgreSQL, `LockThenWrite` elsewhere."""

    def sql(self, text: str) -> Statement:
        """A shared text in this database's words; cached, because rendering takes time."""
        statement = self._statements.get(text)
        if statement is None:
            if len(self._statements) >= CACHED_STATEMENTS:
                self._statements.clear()
            statement = self._statements[text] = self.statement(text)
        return statement

    def statement(self, text: str) -> Statement:
        """The same without the cache, for texts that are made from values and used once."""
        return Statement(self.fill(self.own(text)))

    def own(self, text: str) -> str:
        """This database's own text in place of a shared one, or else the shared one."""
        return self.overrides.get(text.name, text) if isinstance(text, Named) else text

    @cached_property
    def channel(self) -> str:
        """The notification channel of publishers and workers: one for each set of tables, always short."""
        return f"millpond_{hashlib.sha256(f'{self.schema}.{self.prefix}'.encode()).hexdigest()[:16]}"

    def fill(self, text: str) -> str:
        return text.format_map(self._words)

    def in_migration(self, text: str) -> str:
        """A statement of a migration."""
        return self.fill(text)

    def id_in(self, value: UUID) -> Any:
        """An id as a parameter for this database's drivers."""
        return value.int.to_bytes(16, "big")

    id_out: Callable[[Any], UUID] = staticmethod(id_of)

    @abstractmethod
    def probe(self, params: dict[str, Any], gaps: Sequence[tuple[int, int]], floors: Sequence[Any]) -> Step:
        """Return the lanes to visit. A known lane counts if it has a message due at or above its floor; from each gap,
        the lowest lane with any message."""

    def many(
        self, text: str, shared: Mapping[str, Any], columns: Sequence[str], rows: Sequence[tuple[Any, ...]]
    ) -> Steps[None]:
        """Run a text for each row, in the fastest way. `shared`: parameters of all rows. The first column is an id."""
        values = tuple(shared.values())
        yield Many(self.sql(text), (*shared, *columns), [(*values, *row) for row in rows])

    def remove(self, ids: Sequence[Any]) -> Step:
        """Delete messages, without a read of other rows."""
        return Query(self.sql(REMOVE), {"ids": ids})

    def delete(self, text: str, params: Mapping[str, Any]) -> Steps[int]:
        """Run a DELETE; returns the number of deleted rows."""
        yield Query(self.sql(text), params)
        return int((yield Query(self.sql("SELECT {changed_rows}"), {}))[0][0])

    def without_waiting(self, step: Step) -> Step:
        """The same statement, which fails instead of waiting for a lock, where the database can do this."""
        return step

    def make_partitions(self, now: int | None) -> Steps[int]:
        """Make the archive's partitions for the days ahead; returns their number. No effect where there are none."""
        yield from ()
        return 0

    async def purge_partitions(self, run: RunSteps, cutoffs: Cutoffs, now: int | None, check: PurgeCheck) -> int:
        """Delete whole partitions of which `cutoffs` keep no message; returns the number of deleted messages.

        `run` runs steps in a transaction. Partitions that are in use are left to a purge row by row.
        """
        return 0

    def examine(self) -> Steps[list[Finding]]:
        """Find faults of this database that hurt the queue."""
        yield from ()
        return []

    def index_archive(self, since: int | None, until: int) -> Steps[None]:
        """Bring an index of the archive up to date that the database completes only later."""
        yield from ()

    def prefer_indexes(self) -> Steps[None]:
        """Let the server read ranges by an index, not the whole table, until the transaction ends."""
        yield from ()

    def lock_archive(self) -> Steps[None]:
        """Lock the tables of a statement that archives, before it, until the end of the transaction.

        Needed where a statement has the time of its beginning even if it then waits for a table: an export would close
        that time meanwhile, and never find the rows.
        """
        yield from ()

    def late(self, low: int, at: int) -> Steps[dict[str, int]]:
        """Open transactions that have archived rows in [low, at): id -> lower bound of their start.

        None where one transaction writes at a time.
        """
        yield from ()
        return {}

    @abstractmethod
    def error_kind(self, error: BaseException) -> ErrorKind:
        """The kind of a driver's exception."""

    def is_damage(self, error: BaseException) -> bool:
        """Whether a row cannot be read because its own bytes are wrong. Other causes, such as a timeout, may end."""
        # Of the driver, which cannot convert a value. A refused certificate is a ValueError and an OSError.
        return isinstance(error, ValueError | TypeError) and not isinstance(error, OSError)

    def is_missing_table(self, error: BaseException) -> bool:
        return self.error_kind(error) is ErrorKind.UNMIGRATED

    def prelude(self) -> Sequence[str]:
        """Statements before the first migration; each may run again."""
        return (
            "CREATE TABLE IF NOT EXISTS {migration} "
            "(version INTEGER NOT NULL PRIMARY KEY, name VARCHAR(100) NOT NULL, applied_at BIGINT NOT NULL)",
        )

    @abstractmethod
    def rename_tables(self, tables: Mapping[str, str], prefix: str) -> Steps[None]:
        """Rename tables (old name -> new name) and all that is named after them. `prefix`: that of the old names."""

    def script(self, text: str) -> str:
        """A statement as the database's command line takes it from a file."""
        return f"{text};\n"

    def lock_map(self, *, alone: bool) -> Steps[None]:
        """Let a change of the shard map come before publishes that begin after it, where row locks are not in turn."""
        yield from ()

    def is_dispensable(self, error: BaseException) -> str | None:
        """What is missing if a migration goes on after this error; None: it must not."""
        return None

    def forget_published(self, limit: int) -> Steps[int]:
        """Delete what INSERT INTO the publishing table left; returns the number, 0 where nothing is left."""
        yield from ()
        return 0

    def lock_migrations(self) -> Steps[None]:
        """Let one process migrate at a time. No statement where a transaction ensures it."""
        yield from ()

    def unlock_migrations(self) -> Steps[None]:
        yield from ()
