"""PostgreSQL: its words in shared texts, and its error codes."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, TypeVar
from uuid import UUID

import asyncpg

from millpond.failed_attempts import HISTORY_LIMIT
from millpond.seam.diagnosis import Finding
from millpond.table_prefix import TABLE_PREFIX
from millpond.transports.database.borrowed.drivers import class_names
from millpond.transports.database.options import is_untrusted
from millpond.transports.database.postgres import partitions
from millpond.transports.database.postgres.examine import examine
from millpond.transports.database.postgres.one_statement import OneStatement
from millpond.transports.database.postgres.rename import rename_tables
from millpond.transports.database.postgres.transaction_marks import PostgresMarks
from millpond.transports.database.sql.dialect import PROBE, Cutoffs, Dialect, ErrorKind, RunSteps
from millpond.transports.database.sql.statement import Query, Step, Steps, Style

if TYPE_CHECKING:
    from millpond.transports.database.exports.ranges import PurgeCheck

T = TypeVar("T")


class PostgresDialect(Dialect):
    name = "postgresql"
    style = Style.DOLLAR
    error_aborts = True
    no_floor = (-(2**63), UUID(int=0))
    overrides = {
        # By ctid: the table has no index on id, and joined to itself it might be read once for each copy.
        "drop copies": """DELETE FROM {staging} WHERE ctid = ANY(ARRAY(SELECT c.ctid FROM (SELECT s.ctid,
        row_number() OVER (PARTITION BY s.id ORDER BY s.lot) AS copy FROM {staging} s WHERE s.lot {lots}) c
        WHERE c.copy > 1))""",
        # LATERAL, ctid: as in a settle.
        "record outcomes": """WITH noted AS MATERIALIZED (SELECT l.ctid, r.outcome, r.delay, r.reason
        FROM unnest(:ids::uuid[], :outcomes::text[], :delays::bigint[], :reasons::text[])
        AS r(id, outcome, delay, reason), LATERAL (SELECT x.ctid FROM {stream_message} x
        WHERE x.stream = :stream AND x.seq = :seq AND x.id = r.id FOR UPDATE) l)
        UPDATE {stream_message} s SET outcome = n.outcome, delay = n.delay, reason = n.reason
        FROM noted n WHERE s.ctid = n.ctid""",
    }
    has_notifications = True
    words = {
        # As a subquery it runs once in a statement, not once for each row.
        "now": "(SELECT coalesce(:now::bigint, (extract(epoch FROM statement_timestamp()) * 1000000)::bigint))",
        "relations": "SELECT c.relname::text FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace "
        "WHERE n.nspname = coalesce(:schema, current_schema())",
        "routines": "SELECT p.proname::text FROM pg_proc p JOIN pg_namespace n ON n.oid = p.pronamespace "
        "WHERE n.nspname = coalesce(:schema, current_schema())",
        "key": "key",
        "inner": "JOIN",
        "id_out": "id",
        "ids": "= ANY(:ids::uuid[])",
        "queues": "= ANY(:queues::text[])",
        "states": "= ANY(:states::text[])",
        "lots": "= ANY(:lots::bigint[])",
        "workers": "= ANY(:workers::bigint[])",
        "ready": "m.state <> 'PROCESSING'",
        "locked": "FOR UPDATE SKIP LOCKED",
        "lock": "FOR UPDATE",
        "share": "FOR SHARE",
        "or_skip": "ON CONFLICT DO NOTHING",
        "database_name": "current_database()",
        "or_lock": "ON CONFLICT (id) DO UPDATE SET id = excluded.id",
        "or_leave": "ON CONFLICT DO NOTHING",
        "or_beat": "ON CONFLICT (id) DO UPDATE SET beat_at = excluded.beat_at, beats = excluded.beats, "
        "lease = excluded.lease, dead_after = excluded.dead_after, by_lock = excluded.by_lock, "
        "stopping = excluded.stopping, queues = excluded.queues, doubted_at = NULL",
        "session": "pg_backend_pid()",
        "take_lock": "pg_try_advisory_lock(:worker::bigint)",
        # Read, not tried: a lock that another process took, however briefly, would be missing to its worker.
        "lock_held": "EXISTS (SELECT 1 FROM pg_locks l WHERE l.locktype = 'advisory' AND l.granted AND l.objsubid = 1 "
        "AND l.database = (SELECT b.oid FROM pg_database b WHERE b.datname = current_database()) "
        "AND (l.classid::bigint << 32 | l.objid::bigint) = w.id)",
        "claim_index": "",
        "lease_index": "",
        "held": "m.state = 'PROCESSING'",
        "id_index": "",
        "body": "payload",
        "raw": "",
        "end_raw": "",
        "archive_index": "",
        "archive_time_index": "",
        "archive_id_index": "",
        "delete_a": "DELETE FROM",
        "div": "/",
        "or_update": "ON CONFLICT (name) DO UPDATE SET",
        "text_of": "",
        "text_and": "||",
        "text_tail": "right",
        "tail_length": str(HISTORY_LIMIT),
        "line_end": "chr(10)",
        "failure_index": "",
        # Not IN (SELECT …): planned as a join while the tables are empty, it reads all messages from then on.
        "in_select": "= ANY(ARRAY(",
        "end_select": "))",
        "names": "json_array_elements_text(:names::json) AS n(name)",
        "above_floor": "AND (m.due_at, m.id) >= (g.floor_due, g.floor_id)",
        "from_floor": "AND (m.due_at, m.id) >= (:floor_due::bigint, :floor_id::uuid)",
        "gaps": "unnest(:lows::smallint[], :highs::smallint[], :floor_dues::bigint[], :floor_ids::uuid[]) "
        "AS g(low, high, floor_due, floor_id)",
    }

    def __init__(self, *, schema: str | None = None, prefix: str = TABLE_PREFIX) -> None:
        super().__init__(schema=schema, prefix=prefix)
        self.marks = PostgresMarks(self)

    def id_in(self, value: UUID) -> Any:
        return value

    @staticmethod
    def id_out(value: Any) -> UUID:
        return value if isinstance(value, UUID) else UUID(value)

    @cached_property
    def writes(self) -> OneStatement:
        return OneStatement(self)

    def probe(self, params: dict[str, Any], gaps: Sequence[tuple[int, int]], floors: Sequence[Any]) -> Step:
        floors = [floor or self.no_floor for floor in floors]
        arrays = {
            "lows": [low for low, _ in gaps],
            "highs": [high for _, high in gaps],
            "floor_dues": [due for due, _ in floors],
            "floor_ids": [id_ for _, id_ in floors],
        }
        return Query(self.sql(PROBE), params | arrays)

    def many(
        self, text: str, shared: Mapping[str, Any], columns: Sequence[str], rows: Sequence[tuple[Any, ...]]
    ) -> Steps[None]:
        arrays = {f"{column}s": list(values) for column, values in zip(columns, zip(*rows, strict=True), strict=True)}
        yield Query(self.sql(text), {**shared, **arrays})

    def make_partitions(self, now: int | None) -> Steps[int]:
        return partitions.make_partitions(self, now)

    async def purge_partitions(self, run: RunSteps, cutoffs: Cutoffs, now: int | None, check: PurgeCheck) -> int:
        return await partitions.purge_partitions(self, run, cutoffs, now, check)

    def index_archive(self, since: int | None, until: int) -> Steps[None]:
        return partitions.index_archive(self, since, until)

    def delete(self, text: str, params: Mapping[str, Any]) -> Steps[int]:
        gone = f"WITH gone AS ({text} RETURNING 1) SELECT count(*) FROM gone"
        return int((yield Query(self.sql(gone), params))[0][0])

    def prefer_indexes(self) -> Steps[None]:
        # The archive is never analyzed before it has thousands of rows, and a partition of today hardly ever.
        yield Query(self.sql("SELECT set_config('enable_seqscan', 'off', true)"), {})

    def late(self, low: int, at: int) -> Steps[dict[str, int]]:
        # A transaction that archives holds this lock on the archive until its end; one that waits for a table may
        # archive next. The server shows the start only to the same user and to monitors, and none of a prepared one.
        rows = yield Query(self.sql(_ARCHIVING), {})
        began = {who: low if start is None else int(start) for who, start in rows}
        return {who: start for who, start in began.items() if start < at}

    def prelude(self) -> Sequence[str]:
        create = [f"CREATE SCHEMA IF NOT EXISTS {self.quote(self.schema)}"] if self.schema else []
        return (*create, *super().prelude())

    def in_migration(self, text: str) -> str:
        if "{schema_dot}" not in text:
            return self.fill(text)
        words = PostgresDialect(schema=self.schema or _SCHEMA, prefix=self.prefix)._words
        return _QUALIFIED % text.format_map({**words, "channel": self.channel})

    def rename_tables(self, tables: Mapping[str, str], prefix: str) -> Steps[None]:
        return rename_tables(self, tables, prefix)

    def lock_migrations(self) -> Steps[None]:
        # Released with the transaction.
        yield Query(self.sql("SELECT pg_advisory_xact_lock(hashtext('{migration}'))"), {})

    def examine(self) -> Steps[list[Finding]]:
        return examine(self)

    def lock_map(self, *, alone: bool) -> Steps[None]:
        """Row locks of publishers that overlap would let a change of the map wait for ever; advisory locks queue."""
        name = "pg_advisory_xact_lock" if alone else "pg_advisory_xact_lock_shared"
        yield Query(self.sql(f"SELECT {name}({int(self.channel[-15:], 16)})"), {})

    def error_kind(self, error: BaseException) -> ErrorKind:
        if getattr(error, "connection_invalidated", False):
            return ErrorKind.LOST  # set by SQLAlchemy
        error = getattr(error, "orig", None) or error  # SQLAlchemy wraps the driver's
        # By SQLSTATE: a caller's engine may bring any driver.
        state = getattr(error, "sqlstate", None) or getattr(error, "pgcode", None)
        if isinstance(state, str):
            if state in _BUSY:
                return ErrorKind.BUSY
            if state == "23505":
                return ErrorKind.DUPLICATE
            if state[:2] in _DATA:
                return ErrorKind.DATA
            if state[:2] == "08" or state in _LOST:
                return ErrorKind.LOST
            if state[:2] == "28":
                return ErrorKind.REFUSED
            if state == "42501":
                return ErrorKind.DENIED
            if state == "3D000":
                return ErrorKind.NO_DATABASE
            if state in ("42P01", "42703", "3F000"):
                return ErrorKind.UNMIGRATED
            return ErrorKind.OTHER
        if isinstance(error, asyncpg.ClientConfigurationError):
            return ErrorKind.FOREIGN
        if isinstance(error, asyncpg.InterfaceError) and "clos" in str(error):
            return ErrorKind.LOST
        # Met when a server is killed: the driver's protocol is out of step. Our connections have one user each.
        if isinstance(error, asyncpg.InternalClientError) or "another operation is in progress" in str(error):
            return ErrorKind.LOST
        if is_untrusted(error) or "rejected SSL upgrade" in str(error):
            return ErrorKind.UNTRUSTED
        if isinstance(error, OSError | EOFError | asyncio.TimeoutError):
            return ErrorKind.LOST
        if "psycopg.OperationalError" in class_names(error):  # without a state: an error of connecting
            return ErrorKind.REFUSED if "authentication failed" in str(error) else ErrorKind.LOST
        return ErrorKind.OTHER if isinstance(error, asyncpg.InterfaceError) else ErrorKind.FOREIGN

    def is_damage(self, error: BaseException) -> bool:
        error = getattr(error, "orig", None) or error
        state = getattr(error, "sqlstate", None) or getattr(error, "pgcode", None)
        if isinstance(state, str):
            # Corrupted data or index; data exceptions. Internal errors (XX000) have other causes too, which may end.
            return state in ("XX001", "XX002") or state[:2] == "22"
        return super().is_damage(error)


_SCHEMA = "millpond_schema"
"""Stands for the schema that the session's path names first, which is known when the text runs."""

# Functions and views name all that is ours with its schema, and find the server's own functions and operators only:
# an account that may create functions in our schema could otherwise run them with the rights of the owner.
_QUALIFIED = f"""DO $migration$
DECLARE
  own text := pg_catalog.quote_ident(current_schema());
  path text := pg_catalog.current_setting('search_path');
BEGIN
  SET LOCAL search_path = pg_catalog, pg_temp;
  EXECUTE replace($create$
%s
$create$, '"{_SCHEMA}"', coalesce(own, ''));
  PERFORM set_config('search_path', path, true);
END $migration$"""

_ARCHIVING = """
SELECT l.virtualtransaction, (extract(epoch FROM a.xact_start) * 1000000)::bigint
FROM pg_locks l LEFT JOIN pg_stat_activity a ON a.pid = l.pid
WHERE l.locktype = 'relation' AND l.pid IS DISTINCT FROM pg_backend_pid()
AND l.database = (SELECT b.oid FROM pg_database b WHERE b.datname = current_database())
AND ((l.relation = '{archive}'::regclass AND l.mode = 'RowExclusiveLock')
OR (NOT l.granted AND l.relation IN ('{message}'::regclass, '{archive}'::regclass)))
"""

# Serialization, deadlock, lock wait.
_BUSY = {"40001", "40P01", "55P03"}
# Data exception, constraint violation, limit exceeded.
_DATA = {"22", "23", "54"}
# Shutdown, crash, cannot connect now, too many connections, read-only (an old primary after a failover), idle in
# a transaction for too long.
_LOST = {"57P01", "57P02", "57P03", "53300", "25006", "25P03"}
