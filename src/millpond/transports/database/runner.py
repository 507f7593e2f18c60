"""Run steps on pooled connections, retry them, and translate driver errors."""

from __future__ import annotations

import asyncio
import functools
import random
from collections.abc import Callable, Coroutine
from enum import Enum, auto
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar

from millpond.clock import micros, monotonic, seconds
from millpond.errors import (
    AuthenticationFailed,
    Closed,
    DataRefused,
    EncryptionFailed,
    MissingRight,
    NotMigrated,
    StoreBusy,
    StoreError,
    StoreUnavailable,
    UnknownDatabase,
)
from millpond.loop import Backoff
from millpond.telemetry import Event, Reconnected
from millpond.transports.database.options import StoreOptions
from millpond.transports.database.sql.dialect import Dialect, ErrorKind
from millpond.transports.database.sql.statement import Steps
from millpond.transports.shard_map import ShardRecord, alone
from millpond.transports.url import Url

T = TypeVar("T")
P = ParamSpec("P")

_SHORT = 0.1
"""Seconds for a deadlock to be resolved, or for a dead connection to be replaced."""


class Mode(Enum):
    """The transaction that an operation needs."""

    READ = auto()
    """Reads only; each statement sees the rows that are committed when it begins."""
    WRITE = auto()
    """All or nothing: one transaction."""
    LOOSE = auto()
    """Each step is complete in itself: one transaction, or none where the database takes one statement."""
    ONE = auto()
    """One statement, which is its own transaction."""


class Engine(Protocol):
    """Our own connections. Errors of the driver pass through; `Runner` translates them."""

    @property
    def dialect(self) -> Dialect: ...

    async def run(self, steps: Callable[[], Steps[T]], mode: Mode = Mode.WRITE) -> T:
        """Run the steps on one connection."""

    async def hold(self, worker: int) -> Session:
        """A session for one worker alone, which can hold its lock."""

    async def listen(self, channel: str, on_queue: Callable[[str | None], None]) -> None:
        """Report the queue of each notification until cancelled, and None when some may have been missed.

        Returns at once where the database has no notifications; polling finds every message anyway.
        """

    async def discard(self, worker: int) -> None:
        """Remove the traces of the lock of a dead worker."""

    async def close(self) -> None: ...


class Session(Protocol):
    """A worker's own session; its lock ends with it, for any reason."""

    any_loop: bool
    """Whether every event loop can use it. A connection to a server belongs to the one that opened it."""

    async def run(self, steps: Callable[[], Steps[T]]) -> T:
        """Run the steps here, in one transaction."""

    async def close(self) -> None: ...


class Runner:
    """Runs steps: again after a deadlock or a lost connection, for a bounded time."""

    def __init__(self, engine: Engine, options: StoreOptions, url: Url) -> None:
        self.engine = engine
        self.options = options
        self.url = url
        self.dialect = engine.dialect
        self.dedupe_for = micros(options.dedupe_for, "dedupe_for")
        self.busy_for = seconds(options.busy_timeout, "busy_timeout")
        self.reconnect_for = seconds(options.reconnect_timeout, "reconnect_timeout")
        self.closed = False
        self.shard: ShardRecord | None = None
        """Set if the database is one of several shards, and the handle stands alone."""
        self.on_event: Callable[[Event], None] | None = None

    def now(self) -> int | None:
        return self.options.clock.now()

    def check_open(self, *, closing: bool = False) -> None:
        """Raise `Closed` after `close`, or with `closing` after it has begun."""
        if self.closed or closing:
            raise Closed(f"the store at {self.url} was closed; connect again")

    def check_whole(self, *, closing: bool = False) -> None:
        """Raise if a new message may belong to another shard than this one."""
        self.check_open(closing=closing)
        if self.shard is not None:
            raise alone(self.shard, f"the database at {self.url}")

    async def run(
        self,
        make: Callable[[bool], Steps[T]],
        mode: Mode,
        *,
        wait: bool = True,
        again: bool = False,
        mode_again: Mode | None = None,
        on_lost: Callable[[], None] | None = None,
    ) -> T:
        """Run the steps that `make(again)` returns; `again`: an earlier try may have been committed.

        `wait=False`: the caller tries again by itself, so an error is raised after `_SHORT` seconds. `mode_again`: the
        mode of a try with `again`, if it needs another one. `on_lost` is called after a try whose reply was lost:
        the server may commit it later, also after the next try.
        """
        lost = begun = False
        busy_for, reconnect_for = (self.busy_for, self.reconnect_for) if wait else (_SHORT, _SHORT)

        def begin() -> Steps[T]:
            nonlocal begun
            begun = True
            return make(again)

        started = monotonic()
        backoff: Backoff | None = None
        while True:
            self.check_open()
            try:
                result = await self.engine.run(begin, (again and mode_again) or mode)
                if lost and self.on_event is not None:
                    self.on_event(Reconnected(monotonic() - started))
                return result
            except Exception as e:
                kind = self.dialect.error_kind(e)
                elapsed = monotonic() - started
                if kind in (ErrorKind.BUSY, ErrorKind.DUPLICATE):
                    # The steps before this one may have been committed.
                    again = again or (begun and mode is Mode.LOOSE)
                    if elapsed > busy_for:
                        if kind is ErrorKind.DUPLICATE:
                            raise self.translated(e, kind) from e
                        busy = StoreBusy(
                            f"the database at {self.url} was busy for {elapsed:.1f} s: other transactions hold "
                            f"locks; {'a part may be' if again else 'nothing was'} written, call again"
                        )
                        busy.again = again
                        raise busy from e
                elif kind is ErrorKind.LOST:
                    # Without a connection no statement was sent.
                    again, lost = again or begun, True
                    if begun and on_lost is not None:
                        on_lost()
                    if elapsed > reconnect_for:
                        error = StoreUnavailable(
                            f"no connection to the database at {self.url} for {elapsed:.1f} s; the call may be "
                            "made again"
                        )
                        error.unsent = not again
                        raise error from e
                elif kind is ErrorKind.FOREIGN:
                    raise
                else:
                    raise self.translated(e, kind) from e
                backoff = backoff or Backoff(0.01, 0.5)
                await asyncio.sleep(backoff.next() * (0.5 + random.random()))

    async def read(self, steps: Callable[[], Steps[T]]) -> T:
        return await self._repeat(steps, Mode.READ)

    async def write(self, steps: Callable[[], Steps[T]]) -> T:
        return await self._repeat(steps, Mode.WRITE)

    async def loose(self, steps: Callable[[], Steps[T]]) -> T:
        return await self._repeat(steps, Mode.LOOSE)

    async def _repeat(self, steps: Callable[[], Steps[T]], mode: Mode) -> T:
        """Run steps that need not know whether an earlier try may have been committed."""
        return await self.run(lambda again: steps(), mode)

    def translated(self, error: Exception, kind: ErrorKind) -> Exception:
        return translated(self.url, error, kind)


def translated(url: Url, error: Exception, kind: ErrorKind) -> Exception:
    """The error for callers: the event, and the remedy."""
    match kind:
        case ErrorKind.REFUSED:
            return AuthenticationFailed(
                f"the database refused the login at {url}; check user, password, and whether it asks for TLS"
            )
        case ErrorKind.DENIED:
            return MissingRight(
                f"the account lacks a right at {url}: {url.hide(error)}; grant it (docs/how-to/rights.md has the lists)"
            )
        case ErrorKind.UNTRUSTED:
            return EncryptionFailed(
                f"no encrypted connection to {url}: the server offers no TLS, or its certificate is not "
                "signed by an authority you trust for this host; check the CA file and the host name"
            )
        case ErrorKind.NO_DATABASE:
            return UnknownDatabase(f"the server has no such database: {url}; create it first")
        case ErrorKind.UNMIGRATED:
            return NotMigrated(
                f"the database at {url} lacks a table or column of Millpond's; run: millpond migrate {url}"
            )
        case ErrorKind.DATA | ErrorKind.DUPLICATE:
            return DataRefused(f"the database at {url} refused a value: {type(error).__name__}: {url.hide(error)}")
        case _:
            return StoreError(f"the database at {url} answered: {type(error).__name__}: {url.hide(error)}")


class Room:
    """Verbs of one subject over a runner."""

    def __init__(self, runner: Runner) -> None:
        self.runner = runner
        self.d = runner.dialect

    @property
    def now(self) -> int | None:
        """Microseconds of a test's clock; None: the database's clock decides."""
        return self.runner.now()


R = TypeVar("R", bound=Room)
StepsOf = Callable[Concatenate[R, P], Steps[T]]
VerbOf = Callable[Concatenate[R, P], Coroutine[Any, Any, T]]


def _verb(mode: Mode) -> Callable[[StepsOf[R, P, T]], VerbOf[R, P, T]]:
    """Make a verb of a generator method: a coroutine that runs its steps on a pooled connection."""

    def decorate(steps: StepsOf[R, P, T]) -> VerbOf[R, P, T]:
        @functools.wraps(steps)
        async def verb(self: R, /, *args: P.args, **kwargs: P.kwargs) -> T:
            return await self.runner.run(lambda again: steps(self, *args, **kwargs), mode)

        return verb

    return decorate


read, write = _verb(Mode.READ), _verb(Mode.WRITE)
