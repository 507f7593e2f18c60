"""Effects of exceptions: ack policies, NackMessage, RejectMessage; and decisions by hand."""

import asyncio
import logging
from typing import Any

import pytest

from millpond import (
    AckPolicy,
    Capability,
    Delivery,
    LeaseLost,
    Millpond,
    NackMessage,
    Reject,
    RejectMessage,
    Retry,
    State,
)
from millpond.errors import InvalidTime
from tests.waiting import until
from tests.worker.conftest import became, counts, drained, on, row, working

AGAIN = Retry.constant(60)


async def idle(pond: Millpond) -> None:
    await pond.run(until_idle=True, signals=False)


async def test_by_default_an_error_is_retried(pond: Millpond) -> None:
    """RETRYABLE with counters 1/1, due after the delay, the lease cleared, the archive empty."""

    @pond.subscriber("q", retry=AGAIN)
    async def handle(body: int) -> None:
        raise ValueError("no carrier")

    id_ = await pond.publish("q", 1)
    await idle(pond)
    found = await row(pond, id_)
    assert (found.state, found.deliveries, found.attempts) == (State.RETRYABLE, 1, 1)
    assert found.error == "ValueError: no carrier"
    assert found.due_us >= found.first_attempt_us + 60_000_000
    assert found.lease_us is None
    assert await counts(pond) == {State.RETRYABLE: 1}


@pytest.mark.parametrize(
    ("options", "state", "reason"),
    [
        ({"retry": Retry.none()}, State.FAILED, "retries used up"),
        ({"ack_policy": AckPolicy.REJECT_ON_ERROR, "retry": AGAIN}, State.FAILED, "error"),
        ({"ack_policy": AckPolicy.NACK_ON_ERROR, "retry": AGAIN}, State.RETRYABLE, None),
        ({"ack_policy": AckPolicy.ACK_FIRST, "retry": AGAIN}, State.COMPLETED, None),
        ({"ack_policy": AckPolicy.MANUAL, "retry": AGAIN}, State.RETRYABLE, None),
        ({"retry": Retry(never=(ValueError,))}, State.FAILED, "retries used up"),
        ({"retry": Retry(never=(KeyError,))}, State.RETRYABLE, None),
    ],
)
@pytest.mark.parametrize("kind", ["async", "sync", "batch"])
@on("memory")
async def test_policies(pond: Millpond, options: dict, state: State, reason: str | None, kind: str) -> None:

    def fail(body: Any) -> None:
        raise ValueError("no carrier")

    async def fail_async(body: Any) -> None:
        raise ValueError("no carrier")

    async def fail_batch(bodies: list[Any]) -> None:
        raise ValueError("no carrier")

    handler = {"async": fail_async, "sync": fail, "batch": fail_batch}[kind]
    pond.subscriber("q", **options, **({"batch": 10} if kind == "batch" else {}))(handler)
    id_ = await pond.publish("q", 1)
    await idle(pond)
    found = await row(pond, id_)
    assert (found.state, found.reason, found.attempts) == (state, reason, 1)


@on("memory")
async def test_messages_that_are_not_kept_leave_no_row(pond: Millpond) -> None:
    """Retention off."""

    @pond.subscriber("q", keep_acked=False, keep_rejected=False, retry=Retry.none())
    async def handle(body: str) -> None:
        if body == "bad":
            raise ValueError
        if body == "worse":
            raise RejectMessage

    await pond.publish_many("q", ["good", "bad", "worse"])
    await idle(pond)
    assert await counts(pond) == {}


@on("memory")
async def test_ack_first_has_acked_when_the_handler_runs(pond: Millpond) -> None:
    seen = []

    @pond.subscriber("q", ack_policy=AckPolicy.ACK_FIRST)
    async def handle(body: int, delivery: Delivery) -> None:
        seen.append((await row(pond, delivery.id)).state)
        await delivery.nack()  # too late and without effect: the first decision counts
        raise NackMessage

    id_ = await pond.publish("q", 1)
    await idle(pond)
    assert seen == [State.COMPLETED]
    await became(pond, id_, State.COMPLETED)


@on("memory")
async def test_returning_without_a_decision_fails_under_the_manual_policy(
    pond: Millpond, caplog: pytest.LogCaptureFixture
) -> None:
    """MANUAL without ack: an ERROR in the log, and FAILED."""

    @pond.subscriber("q", ack_policy=AckPolicy.MANUAL)
    async def handle(body: int) -> None: ...

    id_ = await pond.publish("q", 1)
    await idle(pond)
    assert (await row(pond, id_)).reason == "no decision by the handler"
    assert [r.levelno for r in caplog.records if "returned without ack, nack or reject" in r.message] == [logging.ERROR]


@on("memory", "postgresql")
async def test_nack_message_decides_on_the_delay(pond: Millpond) -> None:
    """The message must not be FAILED at once."""

    @pond.subscriber("q", retry=Retry.constant(1))
    async def handle(body: int) -> None:
        raise NackMessage("later", delay=60)

    id_ = await pond.publish("q", 1)
    await idle(pond)
    found = await row(pond, id_)
    assert found.state is State.RETRYABLE
    assert found.due_us >= found.last_attempt_us + 59_000_000
    assert found.error == "NackMessage: later"


@on("memory")
@pytest.mark.parametrize("policy", AckPolicy)
async def test_messages_raised_by_the_handler_beat_the_policy(pond: Millpond, policy: AckPolicy) -> None:
    if policy is AckPolicy.ACK_FIRST:
        return  # acked before; tested above

    @pond.subscriber("q", ack_policy=policy, retry=AGAIN)
    async def handle(body: str) -> None:
        raise RejectMessage("discontinued") if body == "reject" else NackMessage

    nacked, rejected = await pond.publish_many("q", ["nack", "reject"])
    await idle(pond)
    assert (await row(pond, nacked)).state is State.RETRYABLE
    found = await row(pond, rejected)
    assert (found.state, found.reason) == (State.FAILED, "discontinued")


@pytest.mark.parametrize("kind", ["async", "sync"])
@pytest.mark.parametrize("raises", [False, True])
@pytest.mark.parametrize(
    ("verb", "state"), [("ack", State.COMPLETED), ("nack", State.RETRYABLE), ("reject", State.FAILED)]
)
@on("memory", "postgresql")
async def test_decisions_by_hand_beat_policy_and_exception(
    pond: Millpond, verb: str, state: State, raises: bool, kind: str
) -> None:
    """The first call wins, and it is durable when it returns."""
    seen = []
    arguments: dict[str, Any] = {"nack": {"delay": 60}, "reject": {"reason": "why"}}.get(verb, {})
    other = "reject" if verb == "ack" else "ack"
    policy = AckPolicy.REJECT_ON_ERROR if verb == "nack" else AckPolicy.NACK_ON_ERROR

    if kind == "async":

        @pond.subscriber("q", ack_policy=policy)
        async def handle(body: int, delivery: Delivery) -> None:
            await getattr(delivery, verb)(**arguments)
            seen.append((await row(pond, delivery.id)).state)
            await getattr(delivery, other)()
            if raises:
                raise ValueError

    else:

        @pond.subscriber("q", ack_policy=policy)
        def handle_sync(body: int, delivery: Delivery) -> None:
            getattr(delivery, f"{verb}_sync")(**arguments)
            seen.append(delivery.decided)
            getattr(delivery, f"{other}_sync")()
            if raises:
                raise ValueError

    id_ = await pond.publish("q", 1)
    await idle(pond)
    found = await row(pond, id_)
    assert (found.state, found.attempts, found.deliveries) == (state, 1, 1)
    assert found.reason == ("why" if verb == "reject" else None)
    assert seen == [state] if kind == "async" else len(seen) == 1


async def test_a_handler_with_an_event_loop_of_its_own_decides(pond: Millpond) -> None:
    """The decision is written in the worker's loop, and the handler's own loop learns of it."""
    decided = []

    @pond.subscriber("q", max_workers=1)
    def handle(body: int, delivery: Delivery) -> None:
        asyncio.run(delivery.ack() if body else delivery.reject("no"))
        decided.append(body)

    await pond.publish_many("q", [0, 1, 2])
    async with working(pond):
        assert await drained(pond) == {State.COMPLETED: 2, State.FAILED: 1}
        await until(lambda: len(decided) == 3)


@on("memory")
async def test_nack_sync_and_reject_sync_store_their_arguments(pond: Millpond) -> None:
    @pond.subscriber("q")
    def handle(verb: str, delivery: Delivery) -> None:
        if verb == "nack":
            delivery.nack_sync(60, error="no carrier")
        else:
            delivery.reject_sync("unknown sku")

    ids = await pond.publish_many("q", ["nack", "reject"])
    await idle(pond)
    nacked, rejected = [await row(pond, id_) for id_ in ids]
    assert (nacked.state, nacked.error) == (State.RETRYABLE, "no carrier")
    assert nacked.due_us - nacked.last_attempt_us >= 60_000_000
    assert (rejected.state, rejected.reason) == (State.FAILED, "unknown sku")


@on("memory")
async def test_an_invalid_decision_raises_in_the_handler(pond: Millpond) -> None:
    errors = []

    @pond.subscriber("q")
    async def handle(body: int, delivery: Delivery) -> None:
        for wrong in ({"delay": -1}, {"delay": float("nan")}):
            with pytest.raises(InvalidTime) as e:
                await delivery.nack(**wrong)
            errors.append(e)
        with pytest.raises(Exception, match="await the verb"):
            delivery.ack_sync()
        await delivery.reject(reason=Exception("any object has a text"))  # type: ignore[arg-type]

    id_ = await pond.publish("q", 1)
    await idle(pond)
    assert len(errors) == 2
    assert (await row(pond, id_)).reason == "any object has a text"


@on("memory", "sqlite", "postgresql", "mariadb")
async def test_a_stale_decision_raises_lease_lost_and_writes_nothing(pond: Millpond) -> None:
    """A late worker must not settle a message that another worker holds."""
    raised = []
    stolen = asyncio.Event()

    @pond.subscriber("q", max_workers=1, heartbeat=20, lease=30)
    async def handle(body: int, delivery: Delivery) -> None:
        await stolen.wait()
        for verb in (delivery.ack, delivery.nack, delivery.reject):
            try:
                await verb()
            except LeaseLost as e:
                raised.append(e)
        raise ValueError("not written either")

    async with working(pond):
        id_ = await pond.publish("q", 1)
        await became(pond, id_, State.PROCESSING)
        assert pond.worker is not None
        await settle_by_another(pond)
        stolen.set()
        await until(lambda: len(raised) == 3)
        await until(lambda: pond.worker.in_flight == 0)
        assert pond.worker.lost == 1
    found = await row(pond, id_)
    assert (found.state, found.reason) == (State.FAILED, "by another")


async def settle_by_another(pond: Millpond) -> None:
    """Settle the message, as another worker does after a reaper: the handler's receipt is stale."""
    worker = pond.worker
    assert worker is not None
    await until(lambda: worker.running)
    (delivery,) = worker._pools[0].held
    await (await pond.transport).settle([Reject(delivery.claim.receipt, "by another")])


@on("memory")
async def test_a_decision_after_the_end_of_the_handler_is_refused(pond: Millpond) -> None:
    late: list[Any] = []
    ended = asyncio.Event()

    @pond.subscriber("q", retry=AGAIN)
    async def handle(body: int, delivery: Delivery) -> None:
        async def later() -> None:
            await ended.wait()
            try:
                await delivery.ack()
            except LeaseLost as e:
                late.append(e)

        late_task.append(asyncio.create_task(later()))
        raise ValueError

    late_task: list[asyncio.Task[None]] = []
    id_ = await pond.publish("q", 1)
    await idle(pond)
    ended.set()
    await late_task[0]
    assert "already settled" in str(late[0])
    assert (await row(pond, id_)).state is State.RETRYABLE


class Mute(Exception):
    def __str__(self) -> str:
        raise RuntimeError("an exception without a text")


@on("memory")
async def test_an_exception_that_cannot_tell_its_text_is_retried_all_the_same(pond: Millpond) -> None:
    """An error inside the retry policy must not make the message FAILED."""

    @pond.subscriber("q")
    async def handle(body: int) -> None:
        raise Mute

    id_ = await pond.publish("q", 1)
    await idle(pond)
    assert (await row(pond, id_)).state is State.RETRYABLE


@on("memory")
async def test_decisions_in_a_transaction_need_the_capability(pond: Millpond) -> None:
    @pond.subscriber("q", retry=Retry.none())
    async def handle(body: int, delivery: Delivery) -> None:
        await delivery.ack(within=object())

    id_ = await pond.publish("q", 1)
    await idle(pond)
    assert str(Capability.TRANSACTIONS.name) in ((await row(pond, id_)).error or "")
