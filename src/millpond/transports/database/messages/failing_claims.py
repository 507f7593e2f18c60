"""Claims of a queue with a message that cannot be claimed: its row is corrupt, or a user's trigger refuses it.

After the second error in a row messages are found without their bodies, and claimed by their ids: by halves, until the
bad ones are alone. A message whose row is damaged, and so cannot even be read, is archived as FAILED, without its body.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Any

from millpond.halves import NOT_THE_ROWS
from millpond.message import short_error
from millpond.outcome import describe
from millpond.transports.database.messages.refused_rows import RefusedRows
from millpond.transports.database.runner import Runner
from millpond.transports.database.sql.columns import ARCHIVED, CLAIMED, SUSPECT_LANE, as_archived, names
from millpond.transports.database.sql.statement import Query, Steps

log = logging.getLogger("millpond")

_LANES = (-(2**15), SUSPECT_LANE), (SUSPECT_LANE, 2**15 - 1)
"""The ranges of lanes of the other messages, and of suspects."""
_MORE = 20
"""Messages that are found beyond the number wanted: some of them may be refused."""
_DUE = """
SELECT m.id FROM {message} m {claim_index}
WHERE m.queue = :queue AND {ready} AND m.lane >= :low AND m.lane < :high AND m.due_at <= {now}
AND NOT EXISTS (SELECT 1 FROM {queue} q WHERE q.name = :queue AND q.paused = 1)
ORDER BY m.lane, m.due_at, m.id LIMIT :limit
"""
_READ = f"SELECT {names(CLAIMED)}, history, last_error FROM {{message}} WHERE id {{ids}}"
_LOCK = "SELECT id FROM {message} WHERE id {ids} AND state <> 'PROCESSING' {locked}"
_WITHOUT_BODY = as_archived(
    ran="0",
    state="'FAILED'",
    reason="'unreadable'",
    attempt="",
    failure="0",
    payload=":payload",
    headers="NULL",
    history="NULL",
    key=":key",
)
_KEY = f"SELECT {names(['key'])} FROM {{message}} WHERE id {{ids}}"
_KEEP = f"INSERT INTO {{archive}} ({names(ARCHIVED)}) SELECT {_WITHOUT_BODY} FROM {{message}} WHERE id {{ids}}"

Whole = Callable[[], Awaitable[None]]
"""Claims in the usual way."""
ByIds = Callable[[Sequence[Any], int], Awaitable[int]]
"""Claims messages of these ids, up to a number; returns the number claimed."""


class FailingClaims:
    """The queues in which claims fail, and their messages that cannot be claimed."""

    def __init__(self, runner: Runner) -> None:
        self._runner = runner
        self._d = runner.dialect
        self._refused: dict[tuple[str, bool], RefusedRows] = {}
        """By queue and kind of claim: suspects alone, or others. Empty: the last claim failed."""

    async def claim(self, queue: str, limit: int, whole: Whole, by_ids: ByIds, *, others: bool, suspects: bool) -> bool:
        """Claim from a queue; returns whether messages were claimed by their ids."""
        refused = self._refused.get((queue, others))
        if refused is None or not refused:
            try:
                await whole()
            except NOT_THE_ROWS:
                raise
            except Exception:
                if refused is None:
                    self._refused[queue, others] = RefusedRows(f"messages of {queue} that cannot be claimed")
                    raise
            else:
                if refused is not None:
                    self._refused.pop((queue, others), None)
                return False
        assert refused is not None
        if others and await self._claim(queue, limit, refused, by_ids, _LANES[0]):
            return True
        if suspects:
            await self._claim(queue, 1, refused, by_ids, _LANES[1])
        return True

    async def _claim(self, queue: str, limit: int, refused: RefusedRows, by_ids: ByIds, lanes: tuple[int, int]) -> int:
        """Claim messages of these lanes by their ids; returns their number."""
        ids = await self._runner.read(partial(self._due, queue, limit + len(refused) + _MORE, lanes))
        claimed = 0

        async def claim(part: Sequence[Any]) -> int:
            nonlocal claimed
            claimed += await by_ids(part, limit - claimed)
            return claimed

        try:
            await refused.write(claim, ids, enough=lambda count: count >= limit)
        finally:
            for id_ in refused.repeated():
                await self._archive_unreadable(id_, refused)
        return claimed

    def _due(self, queue: str, limit: int, lanes: tuple[int, int]) -> Steps[list[Any]]:
        params = {"queue": queue, "low": lanes[0], "high": lanes[1], "limit": limit, "now": self._runner.now()}
        return [row[0] for row in (yield Query(self._d.sql(_DUE), params))]

    async def _archive_unreadable(self, id_: Any, refused: RefusedRows) -> None:
        try:
            await self._runner.read(partial(self._read, id_))
            return
        except NOT_THE_ROWS:
            return
        except Exception as e:
            cause = e.__cause__ or e
            if not self._d.is_damage(cause):
                return
            error = short_error(describe(cause))
        try:
            archived = await self._runner.write(partial(self._archive, id_, error, await self._key(id_)))
        except Exception as e:
            log.warning("message %s can neither be read nor archived (%s)", self._d.id_out(id_), e)
            return
        if archived:
            refused.discard(id_)
            log.error("message %s FAILED, without its body: it cannot be read (%s)", self._d.id_out(id_), error)

    async def _key(self, id_: Any) -> str | None:
        """Its key; None if that cannot be read either."""
        try:
            return await self._runner.read(partial(self._read_key, id_))
        except Exception as e:
            if not self._d.is_damage(e.__cause__ or e):
                raise
            return None

    def _read_key(self, id_: Any) -> Steps[str | None]:
        rows = yield Query(self._d.sql(_KEY), {"ids": [id_]})
        return rows[0][0] if rows else None

    def _read(self, id_: Any) -> Steps[None]:
        yield Query(self._d.sql(_READ), {"ids": [id_]})

    def _archive(self, id_: Any, error: str | None, key: str | None) -> Steps[bool]:
        d = self._d
        yield from d.lock_archive()
        if not (yield Query(d.sql(_LOCK), {"ids": [id_]})):
            return False
        facts = {"payload": b"", "error": error, "key": key, "now": self._runner.now()}
        yield Query(d.sql(_KEEP), {"ids": [id_], **facts})
        yield d.remove([id_])
        return True
