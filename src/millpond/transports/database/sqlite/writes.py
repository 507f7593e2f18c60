"""SQLite: one transaction writes at a time, so its checks hold until its end without a lock."""

from __future__ import annotations

from collections.abc import Sequence
from operator import itemgetter

from millpond.outcome import Change
from millpond.transports.database.sql.dialect import REMOVE
from millpond.transports.database.sql.statement import Query, Steps
from millpond.transports.database.sql.writes import KEEP_IDS, Key, LockThenWrite, archived_as

_HELD = "AND token = :token AND state = 'PROCESSING'"
_KEEP_HELD = f"{KEEP_IDS} {_HELD}"
_REMOVE_HELD = f"{REMOVE} {_HELD}"
_CHANGES = "SELECT changes()"

_id, _token = itemgetter(0), itemgetter(1)


class SoleWriter(LockThenWrite):
    """Archives the messages of one claim without reading them first."""

    def archive(self, change: Change, keys: Sequence[Key], now: int | None, *, wait: bool) -> Steps[list[Key]]:
        if not change.keep or len(set(map(_token, keys))) > 1:
            return (yield from super().archive(change, keys, now, wait=wait))
        held = {"ids": list(map(_id, keys)), "token": keys[0][1]}
        yield Query(self._d.sql(_KEEP_HELD), {**held, **archived_as(change, now)})
        yield Query(self._d.sql(_REMOVE_HELD), held)
        ((removed,),) = yield Query(self._d.sql(_CHANGES), {})
        # If some are missing: the caller's next query finds the archived ones by their token.
        return [] if removed == len(keys) else list(keys)
