"""Find messages by state, queue, key, time, reason, error text or body text, page by page.

State, queue and fingerprint are found by indexes, and so is the time of archived messages. Keys and texts are compared
with rows that are read: a page reads a bounded number of them, and its cursor continues behind the last one.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import AsyncIterator, Callable, Sequence
from datetime import datetime
from typing import Any
from uuid import UUID

import msgspec

from millpond.control.body_path import parsed
from millpond.control.bounded_reads import first, most_after
from millpond.errors import InvalidOption
from millpond.message import LIVE, SETTLED, State
from millpond.seam.operations import Operations, Row

MOST_READ = 5000
"""Rows that one page reads at most."""
MOST_COUNTED = 20_000
"""Rows that a preview reads at most."""
BYTES_OF_PAGE = 32 * 1024 * 1024
"""Bytes of bodies after which a page is full."""


class Choice(msgspec.Struct, frozen=True, kw_only=True):
    """Messages to find. Everything that is given must match."""

    queue: str | None = None
    states: Sequence[State] = ()
    key: str | None = None
    reason: str | None = None
    error: str | None = None
    """Text that the error or the reason contains, in any case of letters."""
    text: str | None = None
    """Text that the body contains."""
    path: str | None = None
    """A value within a JSON body: `customer.id=7`, `items.0.sku=teapot`."""
    since: datetime | None = None
    until: datetime | None = None
    """Archived, or for live messages published, at or after `since` and before `until`."""
    failure: int | None = None
    """Fingerprint of open failures."""

    def __post_init__(self) -> None:
        if self.path is not None:
            parsed(self.path)

    def of_failed(self) -> Choice:
        return msgspec.structs.replace(self, states=(State.FAILED,))

    def reads_rows(self, archived: bool) -> bool:
        """Whether live or archived rows are compared one by one."""
        compared: list[object] = [self.key, self.reason, self.error, self.text, self.path]
        if not archived:
            compared += [self.since, self.until]
        return any(value is not None for value in compared)

    def matches(self, row: Row) -> bool:
        if self.key is not None and row.key != self.key:
            return False
        if self.reason is not None and row.reason != self.reason:
            return False
        if self.error is not None:
            wanted = self.error.casefold()
            if not any(wanted in (text or "").casefold() for text in (row.error, row.reason)):
                return False
        if self.text is not None and self.text.encode(errors="replace") not in row.payload:
            return False
        if self.path is not None and not parsed(self.path).matches(row.payload):
            return False
        if row.archived_us is not None:  # the index has decided
            return True
        return (self.since is None or row.created_at >= self.since) and (
            self.until is None or row.created_at < self.until
        )


class Page(msgspec.Struct, frozen=True, kw_only=True):
    """Messages that match, and how far was read."""

    rows: list[Row]
    cursor: str | None
    """Continues behind this page; None: there is nothing behind it."""
    read: int
    """Rows that were compared."""


class Preview(msgspec.Struct, frozen=True, kw_only=True):
    """Number of messages that match."""

    messages: int
    read: int
    complete: bool
    """False: more messages may match, counting stopped at a limit."""


class _Cursor(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    archived: bool
    position: list[Any] | None


class Search:
    """Reads live messages first, then archived ones, newest first."""

    def __init__(self, operations: Operations, choice: Choice) -> None:
        self._operations = operations
        self._choice = choice
        wanted = choice.states or [*LIVE, *SETTLED]
        self._live = [] if choice.failure is not None else [state for state in wanted if state in LIVE]
        self._settled = [state for state in wanted if state in SETTLED]

    async def page(self, limit: int, cursor: str | None) -> Page:
        at = _decoded(cursor)
        found: list[Row] = []
        read = 0
        size_of_found, most = 0, first()
        while len(found) < limit and read < MOST_READ and size_of_found < BYTES_OF_PAGE:
            size = min(most, MOST_READ - read if self._choice.reads_rows(at.archived) else limit - len(found))
            rows, after = await self._read(at, size)
            most = most_after(rows)
            taken = 0
            for row in rows:
                taken += 1
                if self._choice.matches(row):
                    found.append(row)
                    size_of_found += len(row.payload)
                    if len(found) == limit:
                        break
            read += taken
            if taken < len(rows):  # the page is full before the last row
                after = _Cursor(at.archived, list(rows[taken - 1].position))
            if after is None:
                return Page(rows=found, cursor=None, read=read)
            at = after
        return Page(rows=found, cursor=_encoded(at), read=read)

    async def count(self, counts: Callable[[Row], bool] = lambda row: True) -> Preview:
        """`counts`: whether a row that matches counts."""
        number = read = 0
        at: _Cursor | None = _Cursor(False, None)
        most = first()
        while at is not None and read < MOST_COUNTED:
            rows, at = await self._read(at, most)
            most = most_after(rows)
            read += len(rows)
            number += sum(self._choice.matches(row) and counts(row) for row in rows)
        return Preview(messages=number, read=read, complete=at is None)

    async def batches(self, size: int) -> AsyncIterator[list[Row]]:
        """All messages that match, in lists of at most `size`."""
        at: _Cursor | None = _Cursor(False, None)
        most = first()
        while at is not None:
            rows, at = await self._read(at, min(size, most))
            most = most_after(rows)
            if chosen := [row for row in rows if self._choice.matches(row)]:
                yield chosen

    async def _read(self, at: _Cursor, size: int) -> tuple[list[Row], _Cursor | None]:
        """Some rows and the place behind them; None at the end."""
        choice = self._choice
        if not at.archived:
            rows: list[Row] = []
            if self._live:
                rows = await self._operations.browse(choice.queue, states=self._live, limit=size, after=at.position)
            if len(rows) == size:
                return rows, _Cursor(False, list(rows[-1].position))
            return rows, _Cursor(True, None) if self._settled else None
        more: dict[str, Any] = {} if choice.failure is None else {"failure": choice.failure}
        rows = await self._operations.archived(
            choice.queue,
            states=self._settled,
            since=choice.since,
            until=choice.until,
            limit=size,
            after=at.position,
            **more,
        )
        return rows, _Cursor(True, list(rows[-1].position)) if len(rows) == size else None


def _encoded(cursor: _Cursor) -> str:
    return base64.urlsafe_b64encode(msgspec.json.encode(cursor)).decode().rstrip("=")


def _decoded(text: str | None) -> _Cursor:
    if text is None:
        return _Cursor(False, None)
    try:
        cursor = msgspec.json.decode(base64.urlsafe_b64decode(text + "=" * (-len(text) % 4)), type=_Cursor)
        if cursor.position:  # ids travel as text
            cursor.position[-1] = UUID(str(cursor.position[-1]))
        return cursor
    except (ValueError, binascii.Error, msgspec.MsgspecError):
        raise InvalidOption("the cursor is not known here; begin without a cursor") from None
