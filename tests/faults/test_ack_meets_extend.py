"""A handler's transaction acks a message while a heartbeat lengthens its lease: the ack waits, and counts."""

from __future__ import annotations

import asyncio

import pytest

from millpond import Ack, GiveBack, Nack, Outcome, Receipt, Reject
from tests.faults.conftest import Everywhere
from tests.faults.ground import SERVERS, Ground, message
from tests.waiting import until

WAITING = {
    "postgres": "SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND datname = current_database()",
    "mariadb": "SELECT count(*) FROM information_schema.innodb_trx WHERE trx_state = 'LOCK WAIT'",
}


@pytest.mark.databases(*SERVERS)
@pytest.mark.parametrize(
    "outcome", [Ack, Reject, Nack, GiveBack, lambda receipt: Ack(receipt, keep=False)], ids=lambda o: o.__name__
)
async def test_it_is_not_refused(everywhere: Everywhere, outcome: type[Ack]) -> None:
    async def scenario(here: Ground) -> None:
        await here.store.publish([message("q", "1")])
        (claim,) = await here.store.claim(["q"])
        heartbeat, handler = here.effects.connect(), here.effects.connect()
        cursor = heartbeat.cursor()
        cursor.execute("BEGIN")
        cursor.execute("UPDATE message SET lease_until = lease_until + 1")
        settling = asyncio.create_task(asyncio.to_thread(settle, here, handler, outcome(claim.receipt)))
        await until(lambda: is_waiting(here), "the handler's transaction to wait for the heartbeat's")
        cursor.execute("COMMIT")
        assert await settling == []
        assert await here.processing() == 0
        heartbeat.close()
        handler.close()

    await everywhere(scenario)


def settle(here: Ground, connection: object, outcome: Outcome) -> list[Receipt]:
    cursor = connection.cursor()  # type: ignore[attr-defined]
    cursor.execute("BEGIN")
    refused = here.store.settle_sync([outcome], within=connection)
    cursor.execute("COMMIT")
    return refused


async def is_waiting(here: Ground) -> bool:
    return bool(await here.one(WAITING[here.name]))
