"""Results that are larger together than `max_allowed_packet`: the server ends the connection that brings them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest

from tests.faults.conftest import Everywhere
from tests.faults.load import load
from tests.faults.processes import stop
from tests.faults.setup import PATIENT, Setup

pytestmark = pytest.mark.slow

RESULTS = 200
"""Number of results that come at once, each with an error text of 8,000 characters."""
LIMIT = 1 << 20
"""The lowest limit of the server. Workers do not know it: it was lowered after they connected."""


@pytest.mark.databases("mariadb", own=True, short="mariadb")
async def test_more_than_a_packet(everywhere: Everywhere, long: bool) -> None:
    async def scenario(here: Setup) -> None:
        rounds = 20 if long else 1
        rates = []
        for n in range(rounds):
            options = {"max_workers": RESULTS, **PATIENT}
            worker = here.processes.start(here.plan("plain", "poison", folder=f"worker-{n}", options=options))
            numbers = [f"long-{n}-{i}" for i in range(RESULTS)]
            await here.publish("poison", numbers)
            await here.are_running(*numbers)
            async with load(here, f"load-{n}") as others:
                before = await others.rate(1)
                with low_limit(here):
                    (here.folder / f"worker-{n}" / "released").touch()
                    rates.append(await others.rate(2) / before)
                    await here.drained_of("poison")
            assert "outcomes wait" in worker.log
            await here.drained()
            await stop(worker)
        tally = await here.judge("max_allowed_packet exceeded", rounds, rate=sum(rates) / rounds)
        assert tally.doubled >= rounds * RESULTS  # the retry of each; a cut connection may repeat some, flagged

    await everywhere(scenario)


@contextlib.contextmanager
def low_limit(here: Setup) -> Iterator[None]:
    """The limit for all sessions; those that exist have their own, and are ended."""
    with contextlib.closing(here.effects.connect()) as connection, connection.cursor() as cursor:
        cursor.execute("SET GLOBAL max_allowed_packet = %s", (LIMIT,))
        try:
            cursor.execute(
                "SELECT id FROM information_schema.processlist WHERE db = database() AND id <> connection_id()"
            )
            for (session,) in cursor.fetchall():
                with contextlib.suppress(Exception):  # it may have ended by itself
                    cursor.execute("KILL %s", (session,))
            yield
        finally:
            cursor.execute("SET GLOBAL max_allowed_packet = DEFAULT")
