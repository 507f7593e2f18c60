"""Poison among 500 messages of a claim or a batch: only the poison becomes a dead letter, with the right reason."""

from __future__ import annotations

import pytest

from tests.faults.conftest import Everywhere
from tests.faults.processes import WORKER, history, stop
from tests.faults.setup import ALL, Setup

CLAIM = 500
TIMEOUT = 15.0
"""Seconds after which a hanging handler is given up; on a busy machine 500 healthy messages need part of it."""
OPTIONS = {
    "fetch": CLAIM,
    "lease": 60,
    "timeout": TIMEOUT,
    "retry": {"initial": 0.05, "maximum": 0.1, "attempts": 3},
}
REASONS = {
    "raise": ("retries used up", "ValueError: poison"),
    "hang": ("retries used up", f"TimeoutError: the handler ran longer than {TIMEOUT:g} s"),
    "exit": ("max_crashes", "its process ended while it ran alone there: exit code 1; crash "),
}


@pytest.mark.slow
@pytest.mark.databases(*ALL, short="sqlite", alone=True)
async def test_it_takes_no_neighbour_with_it(everywhere: Everywhere, long: bool) -> None:
    async def in_claims(here: Setup) -> None:
        each = 5 if long else 1
        poison = [f"{kind}-{n}" for kind in REASONS for n in range(each)]
        good = [f"good-{n}" for n in range(CLAIM * each - len(poison))]
        await publish(here, "poison", poison, good)
        await supervised(here, "poison", {**OPTIONS, "max_workers": CLAIM})
        await judge(here, "poison in claims of 500", poison)

    async def in_batches(here: Setup, *kinds: str) -> None:
        poison = [f"{kind}-0" for kind in kinds]
        await publish(here, "poisons", poison, [f"good-{n}" for n in range(CLAIM - len(poison))])
        await supervised(here, "poisons", {**OPTIONS, "batch": CLAIM, "max_workers": 1})
        await judge(here, f"poison in batches ({', '.join(kinds)})", poison)

    await everywhere(in_claims, lambda here: in_batches(here, "exit"), lambda here: in_batches(here, "hang", "raise"))


async def publish(here: Setup, queue: str, poison: list[str], good: list[str]) -> None:
    here.poison.update(poison)
    numbers = poison + good
    here.chance.shuffle(numbers)
    await here.publish(queue, numbers)


async def supervised(here: Setup, queue: str, options: dict[str, object]) -> None:
    """Run workers that are restarted when they die, until all messages are done."""
    plan = here.plan(queue, folder="victims", options=options)
    command = here.processes.start(plan, *WORKER, "--workers", "2")
    await here.drained(within=900)  # the more crashes, the longer the pauses before a restart
    await stop(command)
    here.processes.restarts = sum("began" in line for line in history(plan.folder).read()) - 2


async def judge(here: Setup, scenario: str, poison: list[str]) -> None:
    await here.judge(scenario, len(poison), crashes=here.processes.restarts)
    rows = await here.rows("SELECT payload, reason, error FROM millpond_archive WHERE state = 'FAILED'")
    for payload, reason, error in rows:
        expected, text = REASONS[bytes(payload).decode().partition("-")[0]]
        assert reason == expected and error.startswith(text)
