"""Publishers killed inside their transaction: their own row and the message are both stored, or neither."""

from __future__ import annotations

import asyncio
import signal

import pytest

from tests.faults.conftest import Everywhere
from tests.faults.plan import Aim
from tests.faults.processes import history, some_time
from tests.faults.setup import ALL, Setup
from tests.waiting import until

DRIVERS = {"sqlite": ["sqlite3"], "postgres": ["psycopg", "asyncpg"], "mariadb": ["PyMySQL"]}
TABLE = "CREATE TABLE orders (number VARCHAR(60) NOT NULL)"

AIMS = [
    None,  # killed from outside, at random
    Aim("row", "before", 3),
    Aim("published", "before", 3),
    Aim("committing", "amid", 3),
    Aim("committing", "amid", 5),
]


@pytest.mark.slow
@pytest.mark.databases(*ALL)
async def test_both_or_neither(everywhere: Everywhere, long: bool) -> None:
    async def scenario(here: Setup) -> None:
        await here.rows(TABLE)
        await asyncio.gather(*(kill_publishers(here, driver, 40 if long else 1) for driver in DRIVERS[here.name]))
        orders = [number for (number,) in await here.rows("SELECT number FROM orders")]
        messages = [bytes(payload).decode() for (payload,) in await here.rows("SELECT payload FROM millpond_message")]
        confirmed = {line["confirmed"] for line in history(here.folder).read()}
        tally = await here.tally()
        tally.messages, tally.lost = len(messages), confirmed - set(messages)
        tally.doubled = len(messages) - len(set(messages))
        orphans, ghosts = set(orders) - set(messages), set(messages) - set(orders)
        await here.report(
            f"publishers killed ({', '.join(DRIVERS[here.name])})",
            tally,
            len(here.processes.all),
            orphan_rows=len(orphans),
            ghost_messages=len(ghosts),
        )
        assert not tally.lost
        assert sorted(orders) == sorted(messages)
        assert len(set(orders)) == len(orders)

    await everywhere(scenario)


async def kill_publishers(here: Setup, driver: str, rounds: int) -> None:
    for n in range(rounds):
        for k, aim in enumerate(AIMS):
            producer = f"{driver}-{n}-{k}"
            plan = here.plan(driver=driver, producer=producer, aim=aim)
            publisher = here.processes.start(plan, "tests.faults.publisher")
            if aim is None:

                def at_work() -> bool:
                    return any(line["confirmed"].startswith(producer) for line in history(here.folder).read())  # noqa: B023

                await until(at_work, f"{driver} to publish")
                await some_time(here.chance, 0.0, 0.3)
                publisher.kill()
            assert await publisher.ended() == -signal.SIGKILL, publisher.log
