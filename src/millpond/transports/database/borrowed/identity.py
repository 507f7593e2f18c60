"""Recognise the store's own database on a caller's connection."""

from __future__ import annotations

import contextlib
from typing import Any
from weakref import WeakSet

from millpond.errors import WrongDatabase
from millpond.transports.database.borrowed.drivers import Borrowed, driver_connection
from millpond.transports.database.sql.dialect import Dialect
from millpond.transports.database.sql.statement import Query, Steps, drive_async

# The time of the first migration, and the name: a copy of a database has the same time, and is told apart by its name.
_IDENTITY = "SELECT applied_at, {database_name} FROM {migration} WHERE version = 1"

Identity = tuple[int, str]


def read_identity(d: Dialect) -> Steps[Identity | None]:
    rows = yield Query(d.sql(_IDENTITY), {})
    return (int(rows[0][0]), str(rows[0][1])) if rows else None


class OwnDatabase:
    """The identity of a store's database, and the connections that were found to be to it."""

    def __init__(self, name: str | None = None) -> None:
        self.identity: Identity | None = None
        """None: not connected yet."""
        self._name = name
        """Its name, or its file, in the URL. It decides until the identity is known; None: no connection is refused."""
        self._known: WeakSet[Any] = WeakSet()

    def learn(self, identity: Identity | None) -> None:
        if identity != self.identity:
            self.identity = identity
            self._known.clear()

    async def check(self, d: Dialect, borrowed: Borrowed) -> None:
        """Raise if the connection is to another database. It is asked once, if it can be referenced weakly."""
        if self.identity is None and self._name is None:
            return
        connection = driver_connection(borrowed)
        if connection in self._known:
            return
        found = await drive_async(read_identity(d), borrowed.execute)
        if not self._is(d, found):
            name = "another database" if found is None else f"the database {found[1]!r}"
            own = f"{self.identity[1]!r}, or in another one of the same name" if self.identity else repr(self._name)
            raise WrongDatabase(
                f"within= was given a connection to {name}, and the store is in {own}: give a connection to the "
                "store's own database"
            )
        with contextlib.suppress(TypeError):
            self._known.add(connection)

    def _is(self, d: Dialect, found: Identity | None) -> bool:
        if self.identity is not None or found is None or self._name is None:
            return found == self.identity
        return d.is_named(found[1], self._name)
