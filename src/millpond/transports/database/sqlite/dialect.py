"""SQLite: its words in shared texts, and its error codes."""

from __future__ import annotations

import logging
import os
import sqlite3
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any, TypeVar

import msgspec

from millpond.failed_attempts import HISTORY_LIMIT
from millpond.seam.diagnosis import Finding
from millpond.transports.database.sql.dialect import PROBE, Dialect, ErrorKind
from millpond.transports.database.sql.statement import Query, Step, Steps, Style
from millpond.transports.database.sqlite.examine import examine
from millpond.transports.database.sqlite.rename import rename_tables
from millpond.transports.database.sqlite.sql_words import WORDS
from millpond.transports.database.sqlite.writes import SoleWriter

T = TypeVar("T")
log = logging.getLogger("millpond")


class SqliteDialect(Dialect):
    name = "sqlite"
    style = Style.QMARK
    tick = 0.002  # its clock has a resolution of 1 ms
    grace = 0.0  # one transaction writes at a time: none that archived before can commit later
    words = {
        "now": "coalesce(:now, CAST(round((julianday('now') - 2440587.5) * 86400000.0) AS INTEGER) * 1000)",
        "relations": "SELECT name FROM sqlite_master WHERE :schema IS NULL",
        "routines": "SELECT name FROM sqlite_master WHERE type = 'trigger' AND :schema IS NULL",
        "key": "key",
        "id_out": "lower(substr(hex(id), 1, 8) || '-' || substr(hex(id), 9, 4) || '-' || substr(hex(id), 13, 4) "
        "|| '-' || substr(hex(id), 17, 4) || '-' || substr(hex(id), 21))",
        "ids": "IN (:*ids)",
        "queues": "IN (:*queues)",
        "states": "IN (:*states)",
        "lots": "IN (:*lots)",
        "workers": "IN (:*workers)",
        "ready": "m.state <> 'PROCESSING'",
        # One writer at a time: a write transaction has every row locked.
        "locked": "",
        "lock": "",
        "share": "",
        "or_skip": "ON CONFLICT DO NOTHING",
        "database_name": "(SELECT file FROM pragma_database_list WHERE name = 'main')",
        "or_lock": "ON CONFLICT (id) DO UPDATE SET id = excluded.id",
        "or_leave": "ON CONFLICT DO NOTHING",
        "or_beat": "ON CONFLICT (id) DO UPDATE SET beat_at = excluded.beat_at, beats = excluded.beats, "
        "lease = excluded.lease, dead_after = excluded.dead_after, by_lock = excluded.by_lock, "
        "stopping = excluded.stopping, queues = excluded.queues, doubted_at = NULL",
        # The lock is on a file, and its session has it from the beginning.
        "session": "0",
        "take_lock": "1",
        "lock_held": "millpond_lock_held(w.id)",
        "claim_index": "INDEXED BY {prefix}message_claim",
        "lease_index": "INDEXED BY {prefix}message_lease",
        "held": "m.state = 'PROCESSING'",
        # Without this it would search by queue, of which there are few.
        "id_index": "INDEXED BY sqlite_autoindex_{prefix}message_1",
        # The column takes numbers too.
        "body": "CAST(payload AS BLOB)",
        "raw": "",
        "end_raw": "",
        "archive_index": "INDEXED BY {prefix}archive_queue",
        "archive_time_index": "INDEXED BY {prefix}archive_time",
        "archive_id_index": "INDEXED BY {prefix}archive_id",
        "delete_a": "DELETE FROM",
        "div": "/",
        "changed_rows": "changes()",
        "or_update": "ON CONFLICT (name) DO UPDATE SET",
        "text_of": "",
        "text_and": "||",
        "text_tail": "substr",
        "tail_length": f"-{HISTORY_LIMIT}",
        "line_end": "char(10)",
        "failure_index": "INDEXED BY {prefix}archive_failure",
        "in_select": "IN (",
        "end_select": ")",
        "inner": "CROSS JOIN",
        "names": "(SELECT value AS name FROM json_each(:names)) AS n",
        # Dead rows leave an index at once: there is nothing to skip.
        "above_floor": "",
        "from_floor": "",
        **WORDS,
        "gaps": "(SELECT json_extract(value, '$[0]') AS low, json_extract(value, '$[1]') AS high "
        "FROM json_each(:gaps)) AS g",
    }

    def is_named(self, found: str, named: str) -> bool:
        return not found or os.path.realpath(found) == os.path.realpath(named)  # in memory it has no file

    @cached_property
    def writes(self) -> SoleWriter:
        return SoleWriter(self)

    def probe(self, params: dict[str, Any], gaps: Sequence[tuple[int, int]], floors: Sequence[Any]) -> Step:
        return Query(self.sql(PROBE), {**params, "gaps": msgspec.json.encode(gaps).decode()})

    def rename_tables(self, tables: Mapping[str, str], prefix: str) -> Steps[None]:
        return rename_tables(self, tables)

    def examine(self) -> Steps[list[Finding]]:
        return examine()

    def error_kind(self, error: BaseException) -> ErrorKind:
        if isinstance(error, sqlite3.OperationalError):
            code = getattr(error, "sqlite_errorcode", 0) & 0xFF
            if code in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED):
                return ErrorKind.BUSY
            if str(error).startswith(("no such table", "no such column", "no such index")):
                return ErrorKind.UNMIGRATED
        if isinstance(error, sqlite3.Error) and getattr(error, "sqlite_errorcode", 0) & 0xFF in _DATA:
            return ErrorKind.DATA
        return ErrorKind.OTHER if isinstance(error, sqlite3.Error) else ErrorKind.FOREIGN

    def is_damage(self, error: BaseException) -> bool:
        if isinstance(error, sqlite3.Error):
            code = getattr(error, "sqlite_errorcode", 0) & 0xFF
            return code == sqlite3.SQLITE_CORRUPT or str(error).startswith("Could not decode to UTF-8")
        return super().is_damage(error)


_DATA = {sqlite3.SQLITE_TOOBIG, sqlite3.SQLITE_MISMATCH, sqlite3.SQLITE_CONSTRAINT}
