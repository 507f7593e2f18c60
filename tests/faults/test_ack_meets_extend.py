"""A handler's transaction acks a message while a heartbeat extends its lease: the ack waits, then counts."""

from __future__ import annotations

import asyncio
from functools import partial

import pytest

from millpond import Ack, GiveBack, Nack, Outcome, Receipt, Reject
from tests.faults.conftest import Everywhere
from tests.faults.setup import SERVERS, Setup, message
from tests.triggers import execute
from tests.waiting import IS_WAITING, mariadb_waits, until

pytestmark = pytest.mark.slow_on_servers


@pytest.mark.databases(*SERVERS)
@pytest.mark.parametrize(
    "outcome", [Ack, Reject, Nack, GiveBack, lambda receipt: Ack(receipt, keep=False)], ids=lambda o: o.__name__
)
async def test_it_is_not_refused(everywhere: Everywhere, outcome: type[Ack]) -> None:
    async def scenario(here: Setup) -> None:
        await here.store.publish([message("q", "1")])
        (claim,) = await here.store.claim(["q"])
        heartbeat, handler = here.effects.connect(), here.effects.connect()
        cursor = heartbeat.cursor()
        cursor.execute("BEGIN")
        cursor.execute("UPDATE millpond_message SET lease_until = lease_until + 1")
        settling = asyncio.create_task(asyncio.to_thread(settle, here, handler, outcome(claim.receipt)))
        await until(lambda: is_waiting(here), "the handler's transaction to wait for the heartbeat's")
        cursor.execute("COMMIT")
        assert await settling == []
        assert await here.processing() == 0
        heartbeat.close()
        handler.close()

    await everywhere(scenario)


def settle(here: Setup, connection: object, outcome: Outcome) -> list[Receipt]:
    cursor = connection.cursor()  # type: ignore[attr-defined]
    cursor.execute("BEGIN")
    refused = here.store.transactions.settle_sync([outcome], within=connection)
    cursor.execute("COMMIT")
    return refused


async def is_waiting(here: Setup) -> bool:
    if here.name == "postgres":
        return bool(await here.rows(IS_WAITING))
    return await asyncio.to_thread(lambda: mariadb_waits(partial(execute, here.url)))
