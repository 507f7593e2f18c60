"""Outcomes are written together and never forgotten, and a bad one does not block the others."""

import asyncio
from typing import Any

import pytest

from millpond import Millpond, State
from millpond.errors import AuthenticationFailed, DataRefused, StoreBusy, StoreError, StoreUnavailable
from millpond.outcome import Ack
from millpond.worker.worker import Worker
from tests.waiting import SOON, until
from tests.worker.conftest import counts, drained, on


class Faulty:
    """A transport whose settle is replaced by the test."""

    def __init__(self, transport: Any) -> None:
        self._transport = transport
        self.sizes: list[int] = []
        self.errors: list[Exception] = []
        self.bad: set[Any] = set()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    async def settle(self, outcomes: Any, **options: Any) -> Any:
        self.sizes.append(len(outcomes))
        await asyncio.sleep(0)
        if self.errors:
            raise self.errors.pop(0)
        if any(outcome.receipt.id in self.bad for outcome in outcomes):
            raise DataRefused("the database refused a value")
        return await self._transport.settle(outcomes, **options)


async def work(pond: Millpond, transport: Faulty, **options: Any) -> Worker:
    worker = Worker(pond.subscriptions, **options)
    run = asyncio.create_task(worker.run(transport))  # type: ignore[arg-type]
    await drained(pond)
    worker.stop()
    async with asyncio.timeout(SOON):
        await run
    return worker


@pytest.fixture
async def faulty(pond: Millpond) -> Faulty:
    @pond.subscriber("q", max_workers=100)
    async def handle(body: int) -> None:
        await asyncio.sleep(0)

    return Faulty(await pond.transport)


@on("memory")
async def test_outcomes_are_written_together(pond: Millpond, faulty: Faulty) -> None:
    await pond.publish_many("q", range(1000))
    await work(pond, faulty)
    assert sum(faulty.sizes) == 1000
    assert len(faulty.sizes) < 100


@on("memory")
async def test_the_size_of_a_flush(pond: Millpond, faulty: Faulty) -> None:
    await pond.publish_many("q", range(100))
    await work(pond, faulty, flush_size=10, flush_interval=3600)
    assert sum(faulty.sizes) == 100
    assert max(faulty.sizes) <= 100


@on("memory")
async def test_an_outcome_alone_does_not_wait_for_company(pond: Millpond, faulty: Faulty) -> None:
    """An idle worker flushes at once, at any interval."""
    await pond.publish("q", 1)
    await work(pond, faulty, flush_interval=3600)
    assert faulty.sizes == [1]


@on("memory")
@pytest.mark.parametrize(
    "error", [StoreUnavailable("away"), AuthenticationFailed("the password was changed"), StoreError("disk full")]
)
async def test_outcomes_wait_while_the_store_is_away(
    pond: Millpond, faulty: Faulty, error: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    faulty.errors = [error] * 3
    await pond.publish_many("q", range(50))
    worker = await work(pond, faulty)
    assert await counts(pond) == {State.COMPLETED: 50}
    assert worker.lost == 0
    assert "outcomes wait" in caplog.text


@on("memory")
async def test_a_bad_outcome_does_not_block_its_neighbours(
    pond: Millpond, faulty: Faulty, caplog: pytest.LogCaptureFixture
) -> None:
    """One bad outcome must not block the others."""
    ids = await pond.publish_many("q", range(64))
    faulty.bad = {ids[20], ids[41]}
    worker = Worker(pond.subscriptions)
    run = asyncio.create_task(worker.run(faulty))  # type: ignore[arg-type]
    await until(lambda: _completed(pond, 62))
    await until(lambda: worker.in_flight == 0)
    worker.stop()
    await run
    assert await counts(pond) == {State.COMPLETED: 62, State.PROCESSING: 2}
    assert caplog.text.count("cannot be written") == 2


async def _completed(pond: Millpond, number: int) -> bool:
    return (await counts(pond)).get(State.COMPLETED) == number


@on("memory")
@pytest.mark.parametrize("again", [True, False])
async def test_a_locked_outcome_is_a_repeat_if_it_may_have_been_written(
    pond: Millpond, faulty: Faulty, monkeypatch: pytest.MonkeyPatch, again: bool
) -> None:
    """A message of which no row is left then counts as settled, not as lost."""
    tries: list[bool] = []
    settle = faulty.settle

    async def locked_at_first(outcomes: Any, **options: Any) -> Any:
        tries.append(options["again"])
        if len(tries) == 1:
            busy = StoreBusy("the rows are locked", [outcome.receipt for outcome in outcomes])
            busy.again = again
            raise busy
        return await settle(outcomes, **options)

    monkeypatch.setattr(faulty, "settle", locked_at_first)
    await pond.publish("q", 1)
    await work(pond, faulty)
    assert tries == [False, again]


@on("memory")
async def test_an_unexpected_error_is_no_reason_to_forget_the_others(pond: Millpond, faulty: Faulty) -> None:
    faulty.errors = [RuntimeError("a bug in a driver")]
    await pond.publish_many("q", range(50))
    await work(pond, faulty)
    assert await counts(pond) == {State.COMPLETED: 50}


@on("memory")
async def test_settling_twice_is_one_settlement(pond: Millpond) -> None:
    """Archiving twice gives one row and no error."""
    transport = await pond.transport
    await pond.publish("q", 1)
    (claim,) = await transport.claim(["q"])
    assert await transport.settle([Ack(claim.receipt), Ack(claim.receipt)]) == []
    assert await transport.settle([Ack(claim.receipt)]) == []
    assert await counts(pond) == {State.COMPLETED: 1}
