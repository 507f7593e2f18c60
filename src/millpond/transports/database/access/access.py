"""The access room: tokens and operators' actions, in two small tables."""

from __future__ import annotations

from typing import Any

import msgspec

from millpond.clock import SECOND
from millpond.message import check_name, new_id, short_error
from millpond.seam.access import Action, StoredToken
from millpond.transports.database.runner import Room, read, write
from millpond.transports.database.sql.dialect import Dialect
from millpond.transports.database.sql.statement import Query, Steps
from millpond.transports.validation import page_size

_TOKENS = """
SELECT id, name, hash, roles, queues, created_at, expires_at FROM {token}
WHERE expires_at IS NULL OR expires_at > {now} ORDER BY name
"""
_REPLACE = "DELETE FROM {token} WHERE name = :name"
# The row stays: a server whose last token was removed must not let everyone in.
_REMOVE = "UPDATE {token} SET hash = '', expires_at = 0 WHERE name = :name"
_NAMED = "SELECT id FROM {token} WHERE name = :name AND hash <> ''"
_ANY = "SELECT 1 FROM {token} LIMIT 1"
_RESET = "DELETE FROM {token}"
_ADD = """
INSERT INTO {token} (id, name, hash, roles, queues, created_at, expires_at)
VALUES (:id, :name, :hash, :roles, :queues, {now}, :expires)
"""
_RECORD = """
INSERT INTO {audit} (id, at, actor, action, queue, detail) VALUES (:id, {now}, :actor, :action, :queue, :detail)
"""
_ACTIONS = "SELECT at, actor, action, queue, detail FROM {audit} ORDER BY at DESC, id DESC LIMIT :limit"
_OLD_ACTIONS = "SELECT id FROM {audit} WHERE at <= {now} - :age ORDER BY at, id LIMIT :limit"
_FORGET_ACTIONS = "DELETE FROM {audit} WHERE id {ids}"
_LONGEST = 255
ACTIONS_KEPT = 400 * 86_400 * SECOND
"""Age of actions in microseconds from which a purge deletes them: more than a year."""


def forget_actions(d: Dialect, now: int | None, limit: int) -> Steps[int]:
    """Delete old actions of operators; returns their number."""
    rows = yield Query(d.sql(_OLD_ACTIONS), {"age": ACTIONS_KEPT, "now": now, "limit": limit})
    if rows:
        yield Query(d.sql(_FORGET_ACTIONS), {"ids": [row[0] for row in rows]})
    return len(rows)


class DatabaseAccess(Room):
    @read
    def tokens(self) -> Steps[list[StoredToken]]:
        rows = yield Query(self.d.sql(_TOKENS), {"now": self.now})
        return [
            StoredToken(
                id=id_,
                name=name,
                hash=hash_,
                roles=_words(roles),
                queues=_words(queues),
                created_us=created,
                expires_us=expires,
            )
            for id_, name, hash_, roles, queues, created, expires in rows
        ]

    async def add_token(self, token: StoredToken) -> None:
        check_name(token.name, "token name")
        await self._add(token)

    @write
    def _add(self, token: StoredToken) -> Steps[None]:
        yield Query(self.d.sql(_REPLACE), {"name": token.name})
        values: dict[str, Any] = {
            "id": token.id,
            "name": token.name,
            "hash": token.hash,
            "roles": msgspec.json.encode(token.roles).decode(),
            "queues": msgspec.json.encode(token.queues).decode(),
            "expires": token.expires_us,
            "now": self.now,
        }
        yield Query(self.d.sql(_ADD), values)

    async def remove_token(self, name: str) -> bool:
        return await self._remove(check_name(name, "token name"))

    @write
    def _remove(self, name: str) -> Steps[bool]:
        found = bool((yield Query(self.d.sql(_NAMED), {"name": name})))
        yield Query(self.d.sql(_REMOVE), {"name": name})
        return found

    @read
    def had_tokens(self) -> Steps[bool]:
        return bool((yield Query(self.d.sql(_ANY), {})))

    @write
    def reset_tokens(self) -> Steps[None]:
        yield Query(self.d.sql(_RESET), {})

    @write
    def record(self, action: Action) -> Steps[None]:
        values: dict[str, Any] = {
            "id": self.d.id_in(new_id()),
            "actor": action.actor[:_LONGEST],
            "action": action.action[:_LONGEST],
            "queue": action.queue,
            "detail": short_error(action.detail),
            "now": self.now,
        }
        yield Query(self.d.sql(_RECORD), values)

    async def actions(self, limit: int = 100) -> list[Action]:
        return await self._actions(limit) if page_size(limit) else []

    @read
    def _actions(self, limit: int) -> Steps[list[Action]]:
        rows = yield Query(self.d.sql(_ACTIONS), {"limit": limit})
        return [
            Action(at_us=at, actor=actor, action=action, queue=queue, detail=detail)
            for at, actor, action, queue, detail in rows
        ]


def _words(text: str) -> tuple[str, ...]:
    """A list as stored. One that cannot be read gives no right."""
    try:
        return msgspec.json.decode(text, type=tuple[str, ...])
    except msgspec.MsgspecError:
        return ()
