"""A connection of Django that the server has closed fails at most one attempt of one message."""

import asyncio

import pytest

from millpond import Delivery, Millpond, Retry, State
from millpond.integrations.django import instrument
from tests.rooms.transactions.callers import django_on


@pytest.mark.parametrize("kind", ["sync", "async"])
def test_a_terminated_connection_fails_one_attempt_at_most(postgres_url: str, kind: str) -> None:
    pond = Millpond("memory://")
    instrument(pond)
    failed: list[int] = []
    used: list[object] = []

    def query(body: int) -> None:
        from django.db import connection

        used.append(connection.connection)
        if body == 5:
            connection.close()
            return

        try:
            with connection.cursor() as cursor:
                cursor.execute("SELECT pg_terminate_backend(pg_backend_pid())" if body == 0 else "SELECT 1")
        except Exception:
            failed.append(body)
            raise

    if kind == "sync":
        pond.subscriber("q", max_workers=1, retry=Retry(attempts=1))(query)
    else:
        from asgiref.sync import sync_to_async

        @pond.subscriber("q", max_workers=1, retry=Retry(attempts=1))
        async def handle(body: int, delivery: Delivery) -> None:
            await sync_to_async(query)(body)

    async def work() -> dict[bytes, State]:
        async with pond.testing(raise_errors=False) as test:
            await pond.publish_many("q", [1, 0, 2, 3, 4, 5])
            await test.run()
            return {row.payload: row.state for row in await test.messages("q")}

    with django_on("postgresql", postgres_url):
        from django.db import connections

        connections.settings["default"]["CONN_MAX_AGE"] = None
        states = asyncio.run(work())
    assert used[1] is not None and used[4] is used[3]  # kept from one message to the next
    assert [body for body in failed if body != 0] == []
    assert {states[str(body).encode()] for body in range(1, 6)} == {State.COMPLETED}
