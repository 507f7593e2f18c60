"""What the database knows of the lakes that its archive is exported to, and when a stretch of the archive is closed.

An export takes what was archived before a moment, and must know that nothing more will appear there. A message's
`archived_at` is the time of the statement that archived it; it appears when its transaction is committed, which may
be much later. So a moment is closed when no transaction is in progress that has archived something before it: each
database tells that in its own way (`Dialect.late`). A transaction that stays open holds the export back, and nothing
is lost.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from millpond.errors import LakeDamaged, WrongLake
from millpond.transports.database import statements as sql
from millpond.transports.database.dialect import Dialect
from millpond.transports.database.statement import Query, Steps

_ENTER = "INSERT INTO {export} (lake, shard, until, at, path) VALUES (:lake, :shard, NULL, {now}, :path)"
_OF = "SELECT shard, until FROM {export} WHERE lake = :lake {lock}"
_MOVE = "UPDATE {export} SET path = :path WHERE lake = :lake"
_NOTE = """
UPDATE {export} SET until = :until, at = {now} WHERE lake = :lake AND (until IS NULL OR until < :until)
"""
_ALL = "SELECT lake, shard, until, at, path FROM {export} ORDER BY at"
_FORGET = "DELETE FROM {export} WHERE lake = :lake"
_BOUND = "SELECT count(*), count(until), min(until) FROM {export}"

NOTHING = -(2**63)
"""Before every message."""


class Export(msgspec.Struct, frozen=True):
    """How far the archive was exported to one lake."""

    lake: str
    shard: int
    until_us: int | None
    """The lake durably holds everything archived before this moment; None: nothing yet."""
    at_us: int
    path: str


class Closed(msgspec.Struct, frozen=True):
    """Nothing will appear in the archive before `until_us` any more."""

    until_us: int
    held: bool = False
    """A transaction that has archived messages and is not committed keeps it from being later."""


def open_export(d: Dialect, lake: str, *, shard: int, path: str, until: int | None, now: int | None) -> Steps[None]:
    """Enter a lake, or find that it is the one that was entered; from now on purge leaves what it does not hold."""
    rows: Sequence[Sequence[Any]] = yield Query(d.sql(_OF), {"lake": lake})
    if not rows:
        if until is not None:
            raise WrongLake(
                f"the lake {path} holds exports of shard {shard} of another database, or this one has forgotten it "
                "(millpond lake forget): give the URLs that the lake was made with, in their order, or a new folder"
            )
        yield Query(d.sql(_ENTER), {"lake": lake, "shard": shard, "path": path, "now": now})
        return
    known, noted = rows[0]
    if known != shard:
        raise WrongLake(f"this database is shard {known} of the lake {path}, not {shard}: keep the order of the URLs")
    if noted is not None and (until is None or until < noted):
        raise LakeDamaged(
            f"the lake {path} held more of this database than it does now: it was restored from an older copy, or "
            "files of its log were removed. What it held may have been purged since; restore the newest copy"
        )
    yield Query(d.sql(_MOVE), {"lake": lake, "path": path})
    if until is not None:
        yield from note_export(d, lake, until, now)


def note_export(d: Dialect, lake: str, until: int, now: int | None) -> Steps[None]:
    """The lake durably holds everything archived before this."""
    yield Query(d.sql(_NOTE), {"lake": lake, "until": until, "now": now})


def exports(d: Dialect) -> Steps[list[Export]]:
    return [Export(*row) for row in (yield Query(d.sql(_ALL), {}))]


def forget_export(d: Dialect, lake: str) -> Steps[bool]:
    known = yield Query(d.sql(_OF), {"lake": lake})
    if known:
        yield Query(d.sql(_FORGET), {"lake": lake})
    return bool(known)


def bound(d: Dialect) -> Steps[int | None]:
    """Up to when every lake holds the archive, that moment included; None: there is no lake to wait for."""
    ((lakes, begun, until),) = yield Query(d.sql(_BOUND), {})
    if not lakes:
        return None
    return NOTHING if begun < lakes else int(until) - 1


def moment(d: Dialect, now: int | None) -> Steps[int]:
    """The database's time, at which whoever records what a broker settled has ended: that draws its time first and
    writes later. Where one transaction writes at a time, all before this one have ended."""
    yield Query(d.sql(sql.RECORD_TURN), {})
    return int((yield Query(d.sql(sql.NOW), {"now": now}))[0][0])
