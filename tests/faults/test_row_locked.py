"""Another program locks the row of one message for a minute: its result waits, and no other one does."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest

from tests.faults.conftest import Everywhere
from tests.faults.load import load
from tests.faults.processes import stop
from tests.faults.setup import SERVERS, Setup


@pytest.mark.databases(*SERVERS, short="postgres")
async def test_one_row_is_locked(everywhere: Everywhere, long: bool) -> None:
    async def scenario(here: Setup) -> None:
        lease, minute = (20, 60) if long else (30, 2)
        worker = here.processes.start(here.plan("plain", "poison", folder="worker", options={"lease": lease}))
        await here.publish("poison", ["slow-0"])
        await here.are_running("slow-0")
        async with load(here) as others:
            before = await others.rate(10 if long else 1)
            with locked(here):
                (here.folder / "worker" / "released").touch()  # the handler ends
                during = await others.rate(minute)
                assert await here.one("SELECT count(*) FROM millpond_message WHERE queue = 'poison'") == 1
            after = await others.rate(10 if long else 0)
        await here.drained()
        await stop(worker)
        tally = await here.judge("one row locked", 1, rate=2 * during / (before + after))
        assert tally.doubled == 0
        if long:
            assert during >= 0.9 * min(before, after)

    await everywhere(scenario)


@contextlib.contextmanager
def locked(here: Setup) -> Iterator[None]:
    """Another transaction holds the row of the only message of the queue `poison`."""
    with contextlib.closing(here.effects.connect()) as connection, connection.cursor() as cursor:
        cursor.execute("SELECT id FROM millpond_message WHERE queue = 'poison'")
        ((id_,),) = cursor.fetchall()
        cursor.execute("BEGIN")
        cursor.execute("SELECT id FROM millpond_message WHERE id = %s FOR UPDATE", (id_,))
        assert len(cursor.fetchall()) == 1
        yield
        cursor.execute("ROLLBACK")
