"""Poison among 500 messages of a claim or a batch: it comes to dead letters by itself, for the right reason, alone."""

from __future__ import annotations

import pytest

from tests.faults.conftest import Everywhere
from tests.faults.ground import ALL, Ground
from tests.faults.processes import WORKER, history, stop

CLAIM = 500
TIMEOUT = 3.0
"""What hangs is given up after this; a busy machine needs some of it for 500 that are healthy."""
OPTIONS = {
    "fetch": CLAIM,
    "lease": 60,
    "timeout": TIMEOUT,
    "retry": {"initial": 0.05, "maximum": 0.1, "attempts": 3},
}
REASONS = {
    "raise": ("retries used up", "ValueError: poison"),
    "hang": ("retries used up", f"TimeoutError: the handler ran longer than {TIMEOUT:g} s"),
    "exit": ("max_crashes", "3 deliveries ended without a result (limit 3)"),
}


@pytest.mark.databases(*ALL)
async def test_it_takes_no_neighbour_with_it(everywhere: Everywhere, long: bool) -> None:
    async def in_claims(here: Ground) -> None:
        each = 5 if long else 1
        poison = [f"{kind}-{n}" for kind in REASONS for n in range(each)]
        good = [f"good-{n}" for n in range(CLAIM * each - len(poison))]
        await publish(here, "poison", poison, good)
        await supervised(here, "poison", {**OPTIONS, "max_workers": CLAIM})
        await judge(here, "poison in claims of 500", poison)

    async def in_batches(here: Ground, *kinds: str) -> None:
        poison = [f"{kind}-0" for kind in kinds]
        await publish(here, "poisons", poison, [f"good-{n}" for n in range(CLAIM - len(poison))])
        await supervised(here, "poisons", {**OPTIONS, "batch": CLAIM, "max_workers": 1})
        await judge(here, f"poison in batches ({', '.join(kinds)})", poison)

    await everywhere(in_claims, lambda here: in_batches(here, "exit"), lambda here: in_batches(here, "hang", "raise"))


async def publish(here: Ground, queue: str, poison: list[str], good: list[str]) -> None:
    numbers = poison + good
    here.chance.shuffle(numbers)
    await here.publish(queue, numbers)


async def supervised(here: Ground, queue: str, options: dict[str, object]) -> None:
    """Workers that are started again when they die, until all is done."""
    plan = here.plan(queue, folder="victims", options=options)
    command = here.processes.start(plan, *WORKER, "--workers", "2")
    await here.drained(within=900)  # the more crashes, the longer the pauses before a restart
    await stop(command)
    here.processes.restarts = sum("began" in line for line in history(plan.folder).read()) - 2


async def judge(here: Ground, scenario: str, poison: list[str]) -> None:
    tally = await here.judge(scenario, len(poison), crashes=here.processes.restarts)
    assert tally.dead == set(poison)
    rows = await here.rows("SELECT payload, reason, error FROM message_archive WHERE state = 'FAILED'")
    for payload, reason, error in rows:
        assert (reason, error) == REASONS[bytes(payload).decode().partition("-")[0]]
