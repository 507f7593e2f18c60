"""Retry policies as the worker applies them (FS-C6, FS-C25); the series themselves are tests of Retry."""

import asyncio
from datetime import timedelta

import pytest

from millpond import AckPolicy, Delivery, Millpond, NackMessage, Retry, State
from tests.worker.conftest import became, drained, on, row, working


async def test_exactly_so_many_attempts_then_failed(pond: Millpond) -> None:
    """FS-C6, on the clock of the database."""
    attempts = []

    @pond.subscriber("q", retry=Retry.constant(0.02, attempts=3))
    async def handle(body: int, delivery: Delivery) -> None:
        attempts.append((delivery.attempt, delivery.redelivered))
        raise ValueError(f"attempt {delivery.attempt}")

    async with working(pond):
        id_ = await pond.publish("q", 1)
        found = await became(pond, id_, State.FAILED)
    assert attempts == [(1, False), (2, True), (3, True)]
    assert (found.attempts, found.deliveries) == (3, 3)
    assert (found.reason, found.error) == ("retries used up", "ValueError: attempt 3")


async def runs_at(pond: Millpond, retry: Retry, until: float, **options: object) -> tuple[list[float], State]:
    """At which seconds a message that always fails is run, on a clock that stands still between steps."""
    at: list[float] = []

    @pond.subscriber("q", retry=retry, **options)
    async def handle(body: int) -> None:
        at.append((test.now - began).total_seconds())
        raise ValueError

    async with pond.testing() as test:
        began = test.now
        id_ = await pond.publish("q", 1)
        await test.run()
        while (test.now - began).total_seconds() < until:
            test.advance(0.5)
            await test.run()
        return at, (await row(pond, id_)).state


@on("memory")
@pytest.mark.parametrize(
    ("retry", "series", "state"),
    [
        (Retry.none(), [0], State.FAILED),
        (Retry.constant(2, attempts=3), [0, 2, 4], State.FAILED),
        (Retry.linear(1, 1, attempts=4), [0, 1, 3, 6], State.FAILED),
        (Retry(initial=1, multiplier=2, maximum=4, jitter=0, attempts=5), [0, 1, 3, 7, 11], State.FAILED),
        (Retry(initial=2, multiplier=1.5, jitter=0, attempts=4, first="immediate"), [0, 0, 2, 5], State.FAILED),
        (Retry.constant(timedelta(seconds=5), attempts=None), [0, 5, 10, 15], State.RETRYABLE),
        (Retry(initial=2, multiplier=2, jitter=0, attempts=None, total=7), [0, 2, 6], State.FAILED),
    ],
)
async def test_series(pond: Millpond, retry: Retry, series: list[float], state: State) -> None:
    """FS-C25; immediate first redelivery as ORB-C8."""
    assert await runs_at(pond, retry, until=19) == (series, state)


@on("memory")
async def test_nack_message_counts_as_an_attempt(pond: Millpond) -> None:
    runs = []

    @pond.subscriber("q", retry=Retry(attempts=3))
    async def handle(body: int) -> None:
        runs.append(1)
        raise NackMessage(delay=0)

    id_ = await pond.publish("q", 1)
    await pond.run(until_idle=True, signals=False)
    assert len(runs) == 3
    assert (await row(pond, id_)).reason == "retries used up"


@on("memory")
async def test_a_manual_nack_repeats_as_often_as_the_handler_says(pond: Millpond) -> None:
    """FS-C18: the retry policy is for errors; a decision by hand is the handler's own affair."""
    runs = []

    @pond.subscriber("q", ack_policy=AckPolicy.MANUAL, retry=Retry.none())
    async def handle(body: int, delivery: Delivery) -> None:
        runs.append(1)
        await (delivery.nack() if delivery.attempt < 12 else delivery.ack())

    await pond.publish("q", 1)
    await pond.run(until_idle=True, signals=False)
    assert len(runs) == 12
    assert await drained(pond) == {State.COMPLETED: 1}


@on("memory")
async def test_jitter_is_drawn_for_each_message(pond: Millpond) -> None:
    """VT-D6: messages that failed together must not come back together, at the cap neither."""

    @pond.subscriber("q", retry=Retry(initial=60, maximum=60, jitter=0.5))
    async def handle(body: int) -> None:
        raise ValueError

    async with pond.testing() as test:
        await pond.publish_many("q", range(50))
        await test.run()
        due = {message.due_us for message in await test.messages("q", State.RETRYABLE)}
        first = min(message.created_us for message in await test.messages("q"))
    assert len(due) == 50
    assert all(30_000_000 <= at - first <= 60_000_000 for at in due)


@on("memory")
async def test_expired_messages_are_not_run(pond: Millpond) -> None:
    runs = []

    @pond.subscriber("q")
    async def handle(body: int) -> None:
        runs.append(body)

    async with pond.testing() as test:
        await pond.publish("q", 1, expires=10)
        test.advance(11)
        await test.run()
        (message,) = await test.messages("q", State.FAILED)
    assert (runs, message.reason) == ([], "expired")


@on("memory")
async def test_max_deliveries_and_max_crashes_end_a_message_without_running_it(pond: Millpond) -> None:
    """FS-C5, FS-D17: retries do not spend max_crashes; crashes spend both."""
    runs: list[str] = []

    @pond.subscriber("crashes", max_crashes=2)
    async def crashes(body: int) -> None:
        runs.append("crashes")

    @pond.subscriber("deliveries", max_deliveries=2, max_crashes=None, retry=Retry.constant(0))
    async def deliveries(body: int) -> None:
        runs.append("deliveries")
        raise ValueError

    async with pond.testing() as test:
        transport = await pond.transport
        await pond.publish("crashes", 1)
        await pond.publish("deliveries", 1)
        for _ in range(2):  # a worker that dies with it
            (_,) = await transport.claim(["crashes"], lease=1)
            test.advance(2)
        await test.run()
        (crashed,) = await test.messages("crashes", State.FAILED)
        (delivered,) = await test.messages("deliveries", State.FAILED)
    assert runs == ["deliveries", "deliveries"]
    assert (crashed.reason, crashed.attempts, crashed.deliveries) == ("max_crashes", 0, 3)
    assert (delivered.reason, delivered.attempts, delivered.deliveries) == ("max_deliveries", 2, 3)


@on("postgresql")
async def test_attempts_survive_the_worker(pond: Millpond) -> None:
    """Counted in the database: a new worker goes on where the last one stopped."""
    attempts = []

    @pond.subscriber("q", retry=Retry.constant(0.01, attempts=4))
    async def handle(body: int, delivery: Delivery) -> None:
        attempts.append(delivery.attempt)
        if delivery.attempt in (1, 2):
            pond.stop()
        raise ValueError

    id_ = await pond.publish("q", 1)
    for _ in range(3):
        async with asyncio.timeout(60):
            if len(attempts) < 2:
                await pond.run(signals=False)
            else:
                async with working(pond):
                    await became(pond, id_, State.FAILED)
    assert attempts == [1, 2, 3, 4]
