"""Close Django's database connections that are unusable or too old, around each message."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Generator

from millpond.pond import Millpond
from millpond.worker import Handling


def instrument(pond: Millpond) -> None:
    """Do around each message what Django does around each request: `close_old_connections`.

    A connection that the server has closed fails at most the message that meets it; the next one connects anew.
    Async handlers use the ORM in Django's thread for synchronous code, so the check runs there.
    """

    @pond.middleware
    def in_a_thread(handling: Handling) -> Generator[None, BaseException | None, None]:
        from django.db import close_old_connections

        from millpond.integrations.django import connections_in_tests

        if handling.is_async:
            yield
            return
        if connections_in_tests.are_shared():
            with connections_in_tests.turn_in_thread():
                yield
            return
        close_old_connections()
        yield
        close_old_connections()

    @pond.middleware
    async def in_the_loop(handling: Handling) -> AsyncGenerator[None, BaseException | None]:
        if not handling.is_async:
            yield
            return
        from asgiref.sync import sync_to_async
        from django.db import close_old_connections

        from millpond.integrations.django import connections_in_tests

        if connections_in_tests.are_shared():
            async with connections_in_tests.turn_in_loop():
                yield
            return
        close = sync_to_async(close_old_connections)
        await close()
        yield
        await close()
