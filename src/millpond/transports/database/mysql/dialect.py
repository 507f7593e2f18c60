"""MySQL 8 and MariaDB 10.6+: their words in shared texts, their own texts, and error codes."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property, lru_cache
from typing import Any, TypeVar

import asyncmy
import asyncmy.errors
import msgspec

from millpond.errors import InvalidOption, StoreBusy
from millpond.failed_attempts import HISTORY_LIMIT
from millpond.message import HEADERS_LIMIT
from millpond.seam.diagnosis import Finding
from millpond.transports.database.messages.publish import REMEMBER_STAGED
from millpond.transports.database.mysql import stream_texts
from millpond.transports.database.mysql.examine import examine
from millpond.transports.database.mysql.rename import rename_tables
from millpond.transports.database.mysql.uncommitted import first_uncommitted
from millpond.transports.database.options import is_untrusted
from millpond.transports.database.sql.columns import ARCHIVED, as_archived, back_to_waiting, names
from millpond.transports.database.sql.dialect import Dialect, ErrorKind
from millpond.transports.database.sql.statement import Query, Statement, Step, Steps, Style
from millpond.transports.database.sql.writes import LockThenWrite

T = TypeVar("T")

_BESIDE_BODY = 2 * 4 * HEADERS_LIMIT + 16 * 1024
"""Maximum number of bytes of a statement that publishes one message, without its body."""

# One row per statement would be one round trip each. STRAIGHT_JOIN: the rows first, then the table by key.
_TEXT = "LONGTEXT CHARACTER SET utf8mb4 COLLATE utf8mb4_bin"
_REQUEUE = f"""
UPDATE JSON_TABLE(:rows, '$[*]' COLUMNS (id CHAR(32) PATH '$[0]', delay BIGINT PATH '$[1]',
error {_TEXT} PATH '$[2]', attempt {_TEXT} PATH '$[3]')) AS r STRAIGHT_JOIN {{message}} m ON m.id = UNHEX(r.id)
SET {back_to_waiting("m.", delay="r.delay", error="r.error", attempt="r.attempt")}
"""
_KEEP_EACH = f"""
INSERT INTO {{archive}} ({names(ARCHIVED)})
SELECT {as_archived("m.", reason="r.reason", error="r.error", attempt="r.attempt", failure="r.failure")}
FROM JSON_TABLE(:rows, '$[*]' COLUMNS (id CHAR(32) PATH '$[0]', reason {_TEXT} PATH '$[1]', error {_TEXT} PATH '$[2]',
attempt {_TEXT} PATH '$[3]', failure BIGINT PATH '$[4]'))
AS r STRAIGHT_JOIN {{message}} m ON m.id = UNHEX(r.id)
"""

# Not IN (…): in a small table the server would read all rows for it, and wait for every locked one. A DELETE takes no
# index by name (measured with MariaDB 10.11).
_REMOVE = """
DELETE m FROM JSON_TABLE(:rows, '$[*]' COLUMNS (id CHAR(32) PATH '$')) AS r
STRAIGHT_JOIN {message} m ON m.id = UNHEX(r.id)
"""

# The last ones stay, for a caller that asks for the id of LAST_INSERT_ID().
_PUBLISHED = """
SELECT seq FROM {publish} WHERE seq <= (SELECT max(seq) - 1000 FROM {publish}) ORDER BY seq LIMIT :limit
"""
_LOCK_ARCHIVE = "SELECT 1 FROM {archive}, {message}, {stream_message} WHERE 1 = 0 FOR UPDATE"

_PROBE_LANE = """
(SELECT m.lane FROM {message} m {claim_index} WHERE m.queue = :queue AND {ready} AND m.lane = :low_#
AND m.due_at <= {now} AND m.due_at >= :floor_due_# AND (m.due_at > :floor_due_# OR m.id >= :floor_id_#)
ORDER BY m.due_at, m.id LIMIT 1)
"""
_PROBE_GAP = """
(SELECT m.lane FROM {message} m {claim_index} WHERE m.queue = :queue AND {ready}
AND m.lane >= :low_# AND m.lane <= :high_# ORDER BY m.lane LIMIT 1)
"""


# The publisher first: a later assignment sees the values of earlier ones.
_REMEMBER = (
    REMEMBER_STAGED.partition("ON CONFLICT")[0].replace(" AS d", "")
    + """
ON DUPLICATE KEY UPDATE publisher = IF(expires_at <= :at, VALUES(publisher), publisher),
expires_at = IF(expires_at <= :at, VALUES(expires_at), expires_at)
"""
)


def _numbered(part: str, n: int) -> str:
    return part.replace("#", str(n))


@lru_cache(maxsize=256)
def _without_waiting(statement: Statement) -> Statement:
    # MariaDB only. MySQL has no such limit for one statement: there the session's limit, busy_timeout, ends it.
    return Statement(f"/*M! SET STATEMENT innodb_lock_wait_timeout = 0 FOR */ {statement.text}")


class MysqlDialect(Dialect):
    name = "mysql"
    style = Style.FORMAT
    no_floor = (-(2**63), bytes(16))
    grace = 5.0  # until the statement has written its first row
    # FLUSH TABLES WITH READ LOCK stops statements that have fixed their time, for as long as it likes. It stops the
    # export too, and both go on together.
    least_grace = 1.0
    packet = 16 * 1024 * 1024
    """Maximum number of bytes of a statement; MariaDB's default until it is read."""
    and_locks_archive = "AND NOT EXISTS (SELECT 1 FROM {archive} WHERE 1 = 0 {lock})"
    overrides = {
        "requeue": _REQUEUE,
        "keep each": _KEEP_EACH,
        "remember staged": _REMEMBER,
        **stream_texts.OVERRIDES,
        # One queue at a time: a recursive query cannot search the index, and DISTINCT may read all of it.
        "archived queues": "SELECT min(a.queue) FROM {archive} a {archive_index} WHERE a.queue > :after",
    }
    words = {
        # Not UNIX_TIMESTAMP: it uses the session's time zone, where one hour a year is ambiguous.
        "now": "coalesce(:now, timestampdiff(MICROSECOND, '1970-01-01', utc_timestamp(6)))",
        "relations": "SELECT table_name FROM information_schema.tables "
        "WHERE table_schema = coalesce(:schema, database())",
        "routines": "SELECT routine_name FROM information_schema.routines "
        "WHERE routine_schema = coalesce(:schema, database()) UNION SELECT trigger_name "
        "FROM information_schema.triggers WHERE trigger_schema = coalesce(:schema, database())",
        "key": "`key`",
        "id_out": "lower(insert(insert(insert(insert(hex(id), 21, 0, '-'), 17, 0, '-'), 13, 0, '-'), 9, 0, '-'))",
        "ids": "IN (:*ids)",
        "queues": "IN (:*queues)",
        "states": "IN (:*states)",
        "lots": "IN (:*lots)",
        "workers": "IN (:*workers)",
        "ready": "m.ready = 1",
        "locked": "FOR UPDATE SKIP LOCKED",
        "lock": "FOR UPDATE",
        "share": "LOCK IN SHARE MODE",
        # Not INSERT IGNORE, which hides other errors too.
        "or_skip": "ON DUPLICATE KEY UPDATE id = id",
        "database_name": "{database}",
        "or_lock": "ON DUPLICATE KEY UPDATE id = id",
        "or_leave": "ON DUPLICATE KEY UPDATE part = part",
        "or_beat": "ON DUPLICATE KEY UPDATE beat_at = VALUES(beat_at), beats = VALUES(beats), lease = VALUES(lease), "
        "dead_after = VALUES(dead_after), by_lock = VALUES(by_lock), stopping = VALUES(stopping), "
        "queues = VALUES(queues), doubted_at = NULL",
        "session": "connection_id()",
        # These locks are global in the server: their names, at most 64 characters, contain the database's name.
        "take_lock": "GET_LOCK(concat(left({database}, 40), '.', :worker), 0)",
        "lock_held": "IS_USED_LOCK(concat(left({database}, 40), '.', w.id)) IS NOT NULL",
        "claim_index": "FORCE INDEX ({prefix}message_claim)",
        "lease_index": "FORCE INDEX ({prefix}message_lease)",
        # A claimed message has its own lease or a worker; the state alone is in no index.
        "held": "(m.lease_until > 0 OR (m.lease_until IS NULL AND m.worker IS NOT NULL)) AND m.state = 'PROCESSING'",
        # By old statistics, of a time when the table was small, the server would read all of it.
        "id_index": "FORCE INDEX (PRIMARY)",
        "body": "payload",
        # Half of a surrogate pair is UTF-8 for MariaDB. The driver fails in the middle of such a result.
        "raw": "CAST(",
        "end_raw": " AS BINARY)",
        "archive_index": "FORCE INDEX ({prefix}archive_queue)",
        "archive_time_index": "FORCE INDEX (PRIMARY)",
        "archive_id_index": "FORCE INDEX ({prefix}archive_id)",
        # Only a DELETE in this form takes an index by name.
        "delete_a": "DELETE a FROM",
        "div": "DIV",
        "changed_rows": "ROW_COUNT()",
        "or_update": "ON DUPLICATE KEY UPDATE",
        "text_of": "CONCAT",
        "text_and": ",",
        "text_tail": "RIGHT",
        "tail_length": str(HISTORY_LIMIT),
        "line_end": "CHAR(10)",
        "failure_index": "FORCE INDEX ({prefix}archive_failure)",
        "inner": "STRAIGHT_JOIN",
        "names": "JSON_TABLE(:names, '$[*]' COLUMNS (name VARCHAR(255) CHARACTER SET utf8mb4 COLLATE utf8mb4_bin "
        "PATH '$')) AS n",
        # Of the SQL interface. Only the account that made a procedure may set the time: user() is the caller with the
        # host, current_user() the owner. A body that is no text in UTF-8 has none.
        "clock": "IF(@millpond_now IS NULL OR regexp_replace(user(), '@[^@]*$', '') <> "
        "regexp_replace(current_user(), '@[^@]*$', ''), timestampdiff(MICROSECOND, '1970-01-01', utc_timestamp(6)), "
        "CAST(@millpond_now AS SIGNED))",
        "text_id": "lower(insert(insert(insert(insert(hex(m.id), 21, 0, '-'), 17, 0, '-'), 13, 0, '-'), 9, 0, '-'))",
        # Through UTF-16, because MariaDB takes half of a surrogate pair for UTF-8, and drivers do not.
        "text_body": "CASE WHEN CAST(CONVERT(CONVERT(CONVERT(m.payload USING utf8mb4) USING utf16) USING utf8mb4) "
        "AS BINARY) = m.payload "
        "THEN CONVERT(m.payload USING utf8mb4) END",
        "time_of": "date_add(CAST('1970-01-01' AS DATETIME(6)), INTERVAL ",
        "end_time": " MICROSECOND)",
        # Written out: a comparison of rows, (due_at, id) >= (…), does not search an index here.
        "from_floor": "AND m.due_at >= :floor_due AND (m.due_at > :floor_due OR m.id >= :floor_id)",
    }

    def quote(self, identifier: str) -> str:
        return f"`{identifier}`"

    def is_named(self, found: str, named: str) -> bool:
        # With a schema the statements name another database than the connection does. Some servers ignore the case.
        return self.schema is not None or found.casefold() == named.casefold()

    @cached_property
    def writes(self) -> LockThenWrite:
        return LockThenWrite(self)

    def probe(self, params: dict[str, Any], gaps: Sequence[tuple[int, int]], floors: Sequence[Any]) -> Step:
        # A subquery that depends on an outer row does not search a range of an index here. Each gap is therefore its
        # own query, with its bounds as values.
        parts, values = [], params
        for n, ((low, high), floor) in enumerate(zip(gaps, floors, strict=True)):
            parts.append(_PROBE_LANE if low == high else _PROBE_GAP)
            due, id_ = floor or self.no_floor
            values = values | {f"low_{n}": low, f"high_{n}": high, f"floor_due_{n}": due, f"floor_id_{n}": id_}
        return Query(self.sql(" UNION ALL ".join(_numbered(part, n) for n, part in enumerate(parts))), values)

    def many(
        self, text: str, shared: Mapping[str, Any], columns: Sequence[str], rows: Sequence[tuple[Any, ...]]
    ) -> Steps[None]:
        for part in self._parts((id_.hex(), *rest) for id_, *rest in rows):
            yield Query(self.sql(text), {**shared, "rows": part})

    def _parts(self, rows: Iterable[tuple[Any, ...]]) -> Iterator[str]:
        """Rows as JSON arrays that fit into a statement: the driver's escaping at most doubles a text."""
        part: list[bytes] = []
        size = 0
        for row in map(msgspec.json.encode, rows):
            if part and size + len(row) > self.packet // 4:
                yield f"[{b','.join(part).decode()}]"
                part, size = [], 0
            part.append(row)
            size += len(row) + 1
        yield f"[{b','.join(part).decode()}]"

    def read_packet(self, body_limit: int) -> Steps[None]:
        """Read how large a statement may be. A larger one ends its connection, which looks like an outage."""
        ((self.packet,),) = yield Query(self.sql("SELECT @@max_allowed_packet"), {})
        self.largest_body = (self.packet - _BESIDE_BODY) // 2
        needed = 2 * body_limit + _BESIDE_BODY
        if self.packet < needed:
            raise InvalidOption(
                f"body_limit {body_limit:,} needs a server with max_allowed_packet = {needed:,} or more, because a "
                f"body may double in a statement; this one has {self.packet:,}. Raise it, or lower body_limit"
            )

    def remove(self, ids: Sequence[Any]) -> Step:
        rows = msgspec.json.encode([id_.hex() for id_ in ids]).decode()
        return Query(self.sql(_REMOVE), {"rows": rows})

    def without_waiting(self, step: Step) -> Step:
        assert isinstance(step, Query)
        return Query(_without_waiting(step.statement), step.params)

    def lock_archive(self) -> Steps[None]:
        # MySQL and MariaDB wait for metadata locks (LOCK TABLES, DDL) after they fixed the time of the statement.
        yield Query(self.sql(_LOCK_ARCHIVE), {})

    def late(self, low: int, at: int) -> Steps[dict[str, int]]:
        first = yield from first_uncommitted(self, low, at)
        return {} if first is None else {"uncommitted": first}

    def rename_tables(self, tables: Mapping[str, str], prefix: str) -> Steps[None]:
        return rename_tables(self, tables)

    def script(self, text: str) -> str:
        # The command line ends a statement at each semicolon otherwise.
        return f"DELIMITER //\n{text}//\nDELIMITER ;\n" if ";\n" in text else super().script(text)

    def is_dispensable(self, error: BaseException) -> str | None:
        if error.args and error.args[0] == 1419:
            return (
                f"INSERT INTO {self.table('publish')} does not publish: the server has a binary log and lets this "
                "account make no trigger. Set log_bin_trust_function_creators = 1 and make the trigger as "
                "docs/how-to/sql.md says, or call the procedure instead"
            )
        return None

    def forget_published(self, limit: int) -> Steps[int]:
        rows = yield Query(self.sql(_PUBLISHED), {"limit": limit})
        if rows:
            yield Query(self.sql("DELETE FROM {publish} WHERE seq <= :last"), {"last": rows[-1][0]})
        return len(rows)

    def lock_migrations(self) -> Steps[None]:
        # With the database in its name: these locks are global in the server.
        rows = yield Query(self.sql("SELECT GET_LOCK(concat(left({database}, 24), '.{prefix}migrate'), 60)"), {})
        if rows[0][0] != 1:
            raise StoreBusy("another process has been migrating this database for a minute; run it again later")

    def unlock_migrations(self) -> Steps[None]:
        yield Query(self.sql("SELECT RELEASE_LOCK(concat(left({database}, 24), '.{prefix}migrate'))"), {})

    def examine(self) -> Steps[list[Finding]]:
        return examine(self)

    def error_kind(self, error: BaseException) -> ErrorKind:
        if getattr(error, "connection_invalidated", False):
            return ErrorKind.LOST  # set by SQLAlchemy
        error = getattr(error, "orig", None) or error  # SQLAlchemy wraps the driver's
        code = error.args[0] if error.args and isinstance(error.args[0], int) else 0
        if code in (1205, 1213, 3572):  # lock wait, deadlock, nowait
            return ErrorKind.BUSY
        if code == 1062:
            return ErrorKind.DUPLICATE
        if code in _DATA:
            return ErrorKind.DATA
        if code in (1044, 1045, 1698):
            return ErrorKind.REFUSED
        if code in (1142, 1143, 1370, 1227):  # table, column, routine, a right of the whole server
            return ErrorKind.DENIED
        if code == 1049:
            return ErrorKind.NO_DATABASE
        if code in (1146, 1054):
            return ErrorKind.UNMIGRATED
        if is_untrusted(error.__cause__):
            return ErrorKind.UNTRUSTED
        if code in _LOST or isinstance(error, OSError | EOFError | asyncio.TimeoutError):
            return ErrorKind.LOST
        if isinstance(error, asyncmy.errors.InterfaceError | asyncmy.errors.InternalError) and code == 0:
            return ErrorKind.LOST  # "Cancelled during execution", "Packet sequence number wrong": unusable
        return ErrorKind.OTHER if isinstance(error, asyncmy.errors.MySQLError) else ErrorKind.FOREIGN

    def is_damage(self, error: BaseException) -> bool:
        error = getattr(error, "orig", None) or error
        if error.args and error.args[0] in _DAMAGE:
            return True
        return super().is_damage(error)


# Out of range, wrong value, too long, invalid JSON, NULL, foreign key (two numbers), check (MySQL, MariaDB).
_DATA = {1264, 1366, 1406, 3140, 1048, 1451, 1452, 3819, 4025}
# An index or a table is corrupt.
_DAMAGE = {1034, 1194, 1195, 1712, 1877}
# Cannot connect, gone away, lost, shutdown, killed, too many connections, read-only (an old primary), idle for long.
_LOST = {
    *(2002, 2003, 2006, 2013, 2014, 2055, 1053, 1040, 1077, 1079),
    *(1152, 1158, 1159, 1160, 1161, 1290, 1927, 3169, 4031),
}
