"""What every verb of a store stands on: running steps on our own connections, and what errors mean."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from functools import partial
from typing import TypeVar

from millpond.clock import SECOND, micros, monotonic
from millpond.errors import (
    AuthenticationFailed,
    Closed,
    EncryptionFailed,
    NotMigrated,
    StoreBusy,
    StoreError,
    StoreUnavailable,
    UnknownDatabase,
)
from millpond.transports.database.dialect import Dialect, Trouble
from millpond.transports.database.engine import Engine, Mode
from millpond.transports.database.options import StoreOptions
from millpond.transports.database.statement import Steps
from millpond.transports.url import Url

T = TypeVar("T")


class Running:
    """An engine, its options, and the patience of callers."""

    def __init__(self, engine: Engine, options: StoreOptions, url: Url) -> None:
        self.url = url
        self._engine = engine
        self._options = options
        self._busy_for = micros(options.busy_timeout, "busy_timeout") / SECOND
        self._reconnect_for = micros(options.reconnect_timeout, "reconnect_timeout") / SECOND
        self._closed = False
        self.on_reconnect: Callable[[float], None] | None = None
        """Told how long there was no connection, when there is one again."""

    @property
    def dialect(self) -> Dialect:
        return self._engine.dialect

    def _now(self) -> int | None:
        return self._options.clock.now()

    def _check_open(self) -> None:
        if self._closed:
            raise Closed(f"the store at {self.url} was closed; connect again")

    async def _run(self, make: Callable[[bool], Steps[T]], mode: Mode) -> T:
        """Run steps on a connection of ours: again after a deadlock or a lost connection, for a bounded time.

        `make(again)` makes the steps; `again` says that an earlier try may have been committed.
        """
        again = lost = False
        started = monotonic()
        pause = 0.01
        while True:
            self._check_open()
            try:
                result = await self._engine.run(partial(make, again), mode)
                if lost and self.on_reconnect is not None:
                    self.on_reconnect(monotonic() - started)
                return result
            except Exception as e:
                trouble = self.dialect.trouble(e)
                elapsed = monotonic() - started
                if trouble is Trouble.BUSY:
                    again = again or mode is Mode.LOOSE  # the steps before this one may have been committed
                    if elapsed > self._busy_for:
                        raise StoreBusy(
                            f"the database at {self.url} was busy for {elapsed:.1f} s: other transactions hold "
                            "locks; nothing was written, call again"
                        ) from e
                elif trouble is Trouble.LOST:
                    again = lost = True
                    if elapsed > self._reconnect_for:
                        raise StoreUnavailable(
                            f"no connection to the database at {self.url} for {elapsed:.1f} s; the call may be "
                            "made again"
                        ) from e
                elif trouble is Trouble.FOREIGN:
                    raise
                else:
                    raise self.meaning(e, trouble) from e
                await asyncio.sleep(pause * (0.5 + random.random()))
                pause = min(pause * 2, 0.5)

    def meaning(self, error: Exception, trouble: Trouble) -> Exception:
        return meaning(self.url, error, trouble)


def meaning(url: Url, error: Exception, trouble: Trouble) -> Exception:
    """What a driver's error says to a caller, and what there is to do."""
    match trouble:
        case Trouble.REFUSED:
            return AuthenticationFailed(
                f"the database refused the login or a right at {url}; check user, password, grants, and "
                "whether it asks for TLS"
            )
        case Trouble.UNTRUSTED:
            return EncryptionFailed(
                f"no encrypted connection to {url}: the server offers no TLS, or its certificate is not "
                "signed by an authority you trust for this host; check the CA file and the host name"
            )
        case Trouble.NO_DATABASE:
            return UnknownDatabase(f"the server has no such database: {url}; create it first")
        case Trouble.UNMIGRATED:
            return NotMigrated(
                f"the database at {url} lacks a table or column of Millpond's; run: millpond migrate {url}"
            )
        case _:
            return StoreError(f"the database at {url} answered: {type(error).__name__}: {error}")
