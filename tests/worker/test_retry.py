"""Retry policies as the worker applies them; the series themselves are tests of Retry."""

import asyncio
from datetime import timedelta

import pytest

from millpond import AckPolicy, Delivery, GiveBack, Millpond, NackMessage, RejectMessage, Retry, SnoozeMessage, State
from tests.worker.conftest import became, on, row, working


async def test_a_message_is_failed_after_the_last_attempt(pond: Millpond) -> None:
    """Times are those of the database."""
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
    """The seconds at which a message that always fails runs, on a clock that stands still between steps."""
    at: list[float] = []

    @pond.subscriber("q", retry=retry, **options)
    async def handle(body: int) -> None:
        at.append((test.now - began).total_seconds())
        raise ValueError

    async with pond.testing(raise_errors=False) as test:
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
@pytest.mark.parametrize("policy", [AckPolicy.MANUAL, AckPolicy.NACK_ON_ERROR])
@pytest.mark.parametrize("how", ["method", "method in a thread", "exception"])
async def test_every_spelling_of_a_nack_obeys_the_retry_policy(pond: Millpond, how: str, policy: AckPolicy) -> None:
    at: list[float] = []
    retry = Retry(initial=2, multiplier=3, jitter=0, attempts=3)

    def note() -> None:
        at.append((test.now - began).total_seconds())

    async def handle(body: int, delivery: Delivery) -> None:
        note()
        if how == "method":
            await delivery.nack(error="busy")
        else:
            raise NackMessage("busy")

    def handle_sync(body: int, delivery: Delivery) -> None:
        note()
        delivery.nack_sync(error="busy")

    pond.subscriber("q", ack_policy=policy, retry=retry)(handle_sync if how == "method in a thread" else handle)
    async with pond.testing() as test:
        began = test.now
        await pond.publish("q", 1)
        for _ in range(12):
            await test.run()
            test.advance(1)
        (message,) = await test.messages("q")
    assert at == [0, 2, 8]
    assert (message.state, message.reason, message.attempts) == (State.FAILED, "retries used up", 3)
    assert "busy" in (message.error or "")


@on("memory")
async def test_a_delay_replaces_the_wait_of_the_policy_but_not_its_limit(pond: Millpond) -> None:
    at: list[float] = []

    @pond.subscriber("q", retry=Retry(initial=60, attempts=3))
    async def handle(body: int, delivery: Delivery) -> None:
        at.append((test.now - began).total_seconds())
        await delivery.nack(delay=5)

    async with pond.testing() as test:
        began = test.now
        await pond.publish("q", 1)
        for _ in range(15):
            await test.run()
            test.advance(1)
        (message,) = await test.messages("q")
    assert (at, message.reason) == ([0, 5, 10], "retries used up")


@on("memory")
@pytest.mark.parametrize("how", ["exception", "method", "method in a thread"])
async def test_a_snooze_spends_neither_attempt_nor_delivery(pond: Millpond, how: str) -> None:
    """More often than there are attempts and deliveries, as a rate limit may need it."""
    at: list[float] = []

    async def handle(body: int, delivery: Delivery) -> None:
        at.append((test.now - began).total_seconds())
        if len(at) <= 6:
            if how == "exception":
                raise SnoozeMessage(5)
            await delivery.snooze(timedelta(seconds=5))
        assert (delivery.attempt, delivery.claim.deliveries) == (1, 1)

    def handle_sync(body: int, delivery: Delivery) -> None:
        at.append((test.now - began).total_seconds())
        if len(at) <= 6:
            delivery.snooze_sync(5)

    options = {"retry": Retry(attempts=2), "max_deliveries": 2}
    pond.subscriber("q", **options)(handle_sync if how == "method in a thread" else handle)
    async with pond.testing() as test:
        began = test.now
        await pond.publish("q", 1)
        for _ in range(31):
            await test.run()
            test.advance(1)
        (message,) = await test.messages("q")
    assert at == [0, 5, 10, 15, 20, 25, 30]
    assert (message.state, message.attempts, message.deliveries) == (State.COMPLETED, 1, 1)


@on("memory")
async def test_the_policy_ack_acks_after_an_error_but_not_against_a_decision(
    pond: Millpond, caplog: pytest.LogCaptureFixture
) -> None:
    @pond.subscriber("q", ack_policy=AckPolicy.ACK)
    async def handle(body: str) -> None:
        match body:
            case "raise":
                raise ValueError("no matter")
            case "reject":
                raise RejectMessage("bad")
            case "nack":
                raise NackMessage(delay=60)
            case "snooze":
                raise SnoozeMessage(60)

    async with pond.testing(raise_errors=False) as test:
        for body in ("return", "raise", "reject", "nack", "snooze"):
            await pond.publish("q", body)
        await test.run()
        states = {row.payload.decode().strip('"'): row.state for row in await test.messages("q")}
    assert states == {
        "return": State.COMPLETED,
        "raise": State.COMPLETED,
        "reject": State.FAILED,
        "nack": State.RETRYABLE,
        "snooze": State.PENDING,
    }
    assert "acked, as its ack policy says" in caplog.text


@on("memory")
async def test_jitter_is_drawn_for_each_message(pond: Millpond) -> None:
    """Messages that failed together must not run again together, even at the longest delay."""

    @pond.subscriber("q", retry=Retry(initial=60, maximum=60, jitter=0.5))
    async def handle(body: int) -> None:
        raise ValueError

    async with pond.testing(raise_errors=False) as test:
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
async def test_max_deliveries_ends_a_message_without_running_it(pond: Millpond) -> None:
    """Retries and crashes spend it."""
    runs: list[str] = []

    @pond.subscriber("q", max_deliveries=2, retry=Retry.constant(0))
    async def handle(body: str) -> None:
        runs.append(body)
        raise ValueError

    async with pond.testing(raise_errors=False) as test:
        transport = await pond.transport
        await pond.publish("q", "crashed")
        for _ in range(2):  # a worker dies with it
            (claim,) = await transport.claim(["q"])
            await transport.settle([GiveBack(claim.receipt, crashed=True)])
        await pond.publish("q", "retried")
        await test.run()
        failed = await test.messages("q", State.FAILED)
    assert runs == ["retried", "retried"]
    assert {m.reason for m in failed} == {"max_deliveries"}
    assert [(m.attempts, m.deliveries) for m in failed] == [(0, 3), (2, 3)]


@on("postgresql")
async def test_attempts_survive_the_worker(pond: Millpond) -> None:
    """Attempts are counted in the database: a new worker continues the count."""
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
