"""Ten suspects in five queues: poison is FAILED, innocent messages are not, and other messages do not wait."""

from __future__ import annotations

from uuid import UUID

import pytest

from millpond import GiveBack
from tests.faults.conftest import Everywhere
from tests.faults.load import load
from tests.faults.processes import stop
from tests.faults.setup import ALL, Setup
from tests.waiting import until

pytestmark = pytest.mark.slow

QUEUES = [f"poison-{n}" for n in range(5)]
POISON, INNOCENT = [f"exit-{queue}" for queue in QUEUES], [f"slow-{queue}" for queue in QUEUES]


@pytest.mark.databases(*ALL, short="sqlite", alone=True)
async def test_ten_suspects_in_five_queues(everywhere: Everywhere, long: bool) -> None:
    async def scenario(here: Setup) -> None:
        ids = await make_suspects(here)
        worker = here.processes.start(here.plan("plain", *QUEUES, folder="worker"))
        await worker.began()
        async with load(here) as others:
            before = await others.rate(30 if long else 2)
            assert len(await here.store.operations.reschedule(ids, delay=0)) == len(ids)
            during = await others.rate(60 if long else 2)  # with the start of the child processes
            await until(lambda: started(here), f"{here.name}: all suspects", every=0.1)
            await others.rate(0.0)
            await until(lambda: only_innocents_run(here), f"{here.name}: the end of the poison", every=0.1)
            (here.folder / "worker" / "released").touch()
            after = await others.rate(30 if long else 0)
        await here.drained()
        await stop(worker)
        tally = await here.judge("ten suspects in five queues", len(POISON), rate=2 * during / (before + after))
        assert tally.doubled == 0
        if long:  # short forms run at the same time on all databases and beside other tests
            assert during >= 0.9 * min(before, after)

    await everywhere(scenario)


async def make_suspects(here: Setup) -> list[UUID]:
    """A poison and an innocent suspect in each queue, not due yet. The innocent ones are over the limit of crashes."""
    here.poison.update(POISON)
    ids = []
    for queue, *numbers in zip(QUEUES, POISON, INNOCENT, strict=True):
        for number, crashes in zip(numbers, (2, 5), strict=True):
            await here.publish(queue, [number])
            for n in range(1, crashes + 1):
                (claim,) = await here.store.claim([queue])
                back = GiveBack(claim.receipt, crashed=True, delay=3600 if n == crashes else 0)
                assert await here.store.settle([back]) == []
            ids.append(claim.receipt.id)
    return ids


async def started(here: Setup) -> bool:
    """All innocent suspects run, and all poison has run."""
    return {number for (number,) in await here.rows("SELECT number FROM effects")} >= {*POISON, *INNOCENT}


async def only_innocents_run(here: Setup) -> bool:
    rows = await here.rows("SELECT payload FROM millpond_message WHERE state = 'PROCESSING' AND queue <> 'plain'")
    return sorted(bytes(payload).decode() for (payload,) in rows) == INNOCENT
