"""Two drivers with the same stream name, in separate processes: the first is fenced and ends."""

from __future__ import annotations

import pytest

from tests.faults.conftest import Everywhere
from tests.faults.setup import Setup
from tests.faults.spark_plan import STREAM
from tests.faults.spark_queries import PATIENCE, Queries, judge, publish

pytestmark = [pytest.mark.java, pytest.mark.long]


@pytest.mark.databases("postgres")
async def test_the_first_is_fenced(everywhere: Everywhere) -> None:
    async def scenario(here: Setup) -> None:
        first = Queries(here, place="first", per_trigger=2500, forever=True)
        second = Queries(here, place="second", per_trigger=2500, forever=True)
        await publish(here, 5000, "a")
        two = second.prepare()
        one = await first.advance(first.start(), 1)
        await here.drained(PATIENCE)
        # An idle first driver polls ten times a second. In the middle of a batch it would leave that batch to the
        # second, which has another checkpoint: exactly once is promised for one checkpoint.
        second.go(two)
        assert await one.ended(PATIENCE) == 1, one.log[-3000:]
        assert "StreamFenced" in one.log
        assert f"stream '{STREAM}'" in one.log
        await publish(here, 5000, "b")
        await here.drained(PATIENCE)
        two.kill()
        await judge(here, "two spark drivers of one name", 1, first.files() + second.files())

    await everywhere(scenario)
