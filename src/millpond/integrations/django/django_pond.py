"""The pond of a Django project. It follows Django's database, also to the one that tests create and drop."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager, nullcontext
from typing import Any, Unpack

from asgiref.sync import sync_to_async
from django.core import mail
from django.db import connections, transaction

from millpond.connections import LoopConnections
from millpond.errors import InvalidOption
from millpond.ids import PublishedId
from millpond.integrations.django.connections_in_tests import empty, shared_connections
from millpond.integrations.django.database import alias, database_url, is_in_memory, is_test_database
from millpond.integrations.django.handler_modules import import_handlers
from millpond.message import Message
from millpond.pond import Millpond
from millpond.seam.transport import Transport
from millpond.testing import SyncTestPond, TestConnections, TestPond
from millpond.transports.connect_options import ConnectOptions
from millpond.transports.url import Url


class DjangoPond(Millpond):
    """A pond in the database that Django uses now.

    Modules with handlers are imported before Django's tests create their database, and a pond with a fixed URL would
    publish to the real one.
    """

    _current: LoopConnections

    def __init__(self, **options: Unpack[ConnectOptions]) -> None:
        self._options = options
        super().__init__(database_url(), **options)

    @property
    def _connections(self) -> LoopConnections:
        if not isinstance(self._current, TestConnections) and database_url() != self._url.raw:
            self._url = Url(database_url())
            self._secrets = tuple({*self._secrets, *self._url.secrets})
            kind = _Unreachable if is_in_memory() else LoopConnections
            self._current = kind(self._url, self._options, self.telemetry)
        return self._current

    @_connections.setter
    def _connections(self, connections: LoopConnections) -> None:
        self._current = connections

    @asynccontextmanager
    async def testing(
        self, url: str = "memory://", *, raise_errors: bool = True, **options: Unpack[ConnectOptions]
    ) -> AsyncIterator[TestPond]:
        """`testing` with the handlers of all apps, as workers have them."""
        import_handlers()
        async with super().testing(url, raise_errors=raise_errors, **options) as test:
            yield test

    @contextmanager
    def testing_sync(
        self, url: str = "memory://", *, raise_errors: bool = True, **options: Unpack[ConnectOptions]
    ) -> Iterator[SyncTestPond]:
        """`testing` for Django's tests, with the handlers of all apps.

        They use the test's connections, and so its transaction, one by one.
        With `database_url()` as the URL, in a `TransactionTestCase`, they have their own connections. It begins
        without messages: those of earlier tests are deleted, if Django's test runner made the database.
        """
        import_handlers()  # here, not in the event loop of `testing`: such a module may read the database
        shares = _is_test() and url != database_url()
        if not shares and is_in_memory():
            raise InvalidOption("the database of this test is in memory: give DATABASES a TEST NAME, which is a file")
        kit = super().testing_sync(url, raise_errors=raise_errors, **options)
        with kit as test, shared_connections() if shares else nullcontext():
            if url == database_url() and _is_test() and is_test_database():
                empty(alias(), url, **options)
            yield test

    def connection_of(self, name: str) -> Any:
        """Django's connection to the messages; None while a test has them in another database."""
        tested = isinstance(self._current, TestConnections) and self._current.url.raw != database_url(name)
        return None if tested else connections[name]

    async def _publish(self, messages: Sequence[Message], within: Any) -> list[PublishedId]:
        if not self._uses_the_tests_connection(within):
            return await super()._publish(messages, within)
        return list(await sync_to_async(self._publish_sync)(messages, None))

    def _publish_sync(self, messages: Sequence[Message], within: Any) -> list[PublishedId]:
        if not self._uses_the_tests_connection(within):
            return super()._publish_sync(messages, within)
        with transaction.atomic(using=alias()):
            return super()._publish_sync(messages, connections[alias()])

    def _uses_the_tests_connection(self, within: Any) -> bool:
        """The message belongs to the test's transaction, which is rolled back, and no connection delays the drop."""
        return within is None and not isinstance(self._current, TestConnections) and _is_test()


class _Unreachable(LoopConnections):
    """A database in memory that only Django's own connection reaches."""

    async def transport(self) -> Transport:
        raise InvalidOption(
            "the database of this test is in memory: publish with millpond.integrations.django.publish, "
            "or use pond.testing() or pond.testing_sync()"
        )


def _is_test() -> bool:
    """Whether Django's test environment is set up, by Django's own runner or by pytest-django."""
    return hasattr(mail, "outbox")
