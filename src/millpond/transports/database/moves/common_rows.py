"""Rows that all shards of a pond have: settings of queues, and tokens. A shard that joins gets those of the others."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from millpond.transports.database.moves.move_steps import check_epoch
from millpond.transports.database.runner import Room, read, write
from millpond.transports.database.sql.settings import ALL_SETTINGS, SETTINGS
from millpond.transports.database.sql.statement import Many, Query, Steps

_PRESENT = "SELECT name FROM {queue} WHERE name {queues}"
_ADD_SETTINGS = f"INSERT INTO {{queue}} ({', '.join(SETTINGS)}) VALUES ({', '.join(f':{name}' for name in SETTINGS)})"
_PAUSE = "UPDATE {queue} SET paused = 1 WHERE name {queues}"

_TOKEN = ("id", "name", "hash", "roles", "queues", "created_at", "expires_at")
_TOKENS = f"SELECT {', '.join(_TOKEN)} FROM {{token}}"
_DROP_TOKENS = "DELETE FROM {token}"
_ADD_TOKEN = f"INSERT INTO {{token}} ({', '.join(_TOKEN)}) VALUES ({', '.join(f':{name}' for name in _TOKEN)})"


class CommonRows(Room):
    """The verbs of an operator that adds a shard, or gives it a range."""

    @read
    def settings(self) -> Steps[list[Sequence[Any]]]:
        """Settings of queues. The name is the first column, the pause the second one."""
        return list((yield Query(self.d.sql(ALL_SETTINGS), {})))

    @write
    def add_settings(self, epoch: int, rows: Sequence[Sequence[Any]]) -> Steps[None]:
        """Store settings of queues that have none here, and pause those that are paused there.

        A setting that differs stays: no shard knows which of both is newer.
        """
        yield from check_epoch(self.d, epoch)
        if not rows:
            return
        present = {name for (name,) in (yield Query(self.d.sql(_PRESENT), {"queues": [row[0] for row in rows]}))}
        if missing := [row for row in rows if row[0] not in present]:
            yield Many(self.d.sql(_ADD_SETTINGS), SETTINGS, missing)
        if paused := [name for name, is_paused, *_ in rows if is_paused]:
            yield Query(self.d.sql(_PAUSE), {"queues": paused})

    @read
    def tokens(self) -> Steps[list[Sequence[Any]]]:
        """Tokens, also those that have ended: their rows show that there were some."""
        return list((yield Query(self.d.sql(_TOKENS), {})))

    @write
    def replace_tokens(self, epoch: int, rows: Sequence[Sequence[Any]]) -> Steps[None]:
        yield from check_epoch(self.d, epoch)
        yield Query(self.d.sql(_DROP_TOKENS), {})
        if rows:
            yield Many(self.d.sql(_ADD_TOKEN), _TOKEN, rows)
