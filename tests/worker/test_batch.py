"""Batch handlers: lists of messages, an outcome for each."""

import asyncio
from typing import Any

from millpond import AckPolicy, Delivery, Message, Millpond, Retry, State
from tests.waiting import until
from tests.worker.conftest import became, counts, drained, on, row, working


async def test_a_batch_handler_gets_lists(pond: Millpond) -> None:
    got: list[list[int]] = []

    @pond.subscriber("q", batch=4, max_workers=1)
    async def handle(bodies: list[int]) -> None:
        got.append(bodies)

    await pond.publish_many("q", range(10))
    await pond.run(until_idle=True, signals=False)
    assert sorted(n for batch in got for n in batch) == list(range(10))
    assert max(map(len, got)) == 4
    assert await counts(pond) == {State.COMPLETED: 10}


@on("memory")
async def test_lists_of_every_kind_of_parameter(pond: Millpond) -> None:
    got: list[Any] = []

    @pond.subscriber("q", batch=10)
    def handle(bodies: list[dict], deliveries: list[Delivery], messages: list[Message], headers: list[dict]) -> None:
        got.extend(zip(bodies, deliveries, messages, headers, strict=True))

    await pond.publish_many("q", [{"n": n} for n in range(3)], headers={"trace": "x"})
    await pond.run(until_idle=True, signals=False)
    assert [(body["n"], headers["trace"]) for body, _, _, headers in got] == [(0, "x"), (1, "x"), (2, "x")]
    assert all(delivery.message is message and delivery.body == body for body, delivery, message, _ in got)


@on("memory", "postgresql")
async def test_per_item_outcomes_are_honoured_though_the_handler_raised(pond: Millpond) -> None:
    @pond.subscriber("q", batch=10, retry=Retry.constant(60))
    async def handle(bodies: list[str], deliveries: list[Delivery]) -> None:
        for body, delivery in zip(bodies, deliveries, strict=True):
            if body == "ack":
                await delivery.ack()
            elif body == "reject":
                await delivery.reject("why")
            elif body == "nack":
                await delivery.nack(delay=3600)
        raise ValueError("the rest")

    bodies = ["ack", "reject", "nack", "rest"]
    ids = dict(zip(bodies, await pond.publish_many("q", bodies), strict=True))
    await pond.run(until_idle=True, signals=False)
    assert (await row(pond, ids["ack"])).state is State.COMPLETED
    assert (await row(pond, ids["reject"])).reason == "why"
    nacked, rest = await row(pond, ids["nack"]), await row(pond, ids["rest"])
    assert (nacked.state, nacked.error) == (State.RETRYABLE, None)
    assert (rest.state, rest.error) == (State.RETRYABLE, "ValueError: the rest")


@on("memory")
async def test_a_sync_batch_handler_decides_by_hand(pond: Millpond) -> None:
    @pond.subscriber("q", batch=10, ack_policy=AckPolicy.MANUAL)
    def handle(bodies: list[int], deliveries: list[Delivery]) -> None:
        for body, delivery in zip(bodies, deliveries, strict=True):
            if body < 2:
                delivery.ack_sync()

    await pond.publish_many("q", range(4))
    await pond.run(until_idle=True, signals=False)
    assert await counts(pond) == {State.COMPLETED: 2, State.FAILED: 2}


@on("memory", "postgresql")
async def test_gathering_waits_for_a_full_batch(pond: Millpond) -> None:
    got: list[list[int]] = []

    @pond.subscriber("q", batch=3, max_workers=1, gather=30)
    async def handle(bodies: list[int]) -> None:
        got.append(bodies)

    async with working(pond):
        for n in range(3):
            id_ = await pond.publish("q", n)
            if n < 2:
                await became(pond, id_, State.PROCESSING)
                assert got == []
        assert await drained(pond) == {State.COMPLETED: 3}
    assert got == [[0, 1, 2]]


@on("memory")
async def test_gathering_ends_after_its_time(pond: Millpond) -> None:
    got: list[list[int]] = []

    @pond.subscriber("q", batch=3, max_workers=1, gather=0.1)
    async def handle(bodies: list[int]) -> None:
        got.append(bodies)

    async with working(pond):
        await pond.publish_many("q", range(2))
        assert await drained(pond) == {State.COMPLETED: 2}
    assert got == [[0, 1]]


@on("memory", "postgresql")
async def test_a_stop_while_gathering_gives_back_waiting_messages(pond: Millpond) -> None:
    got: list[list[int]] = []

    @pond.subscriber("q", batch=3, gather=30)
    async def handle(bodies: list[int]) -> None:
        got.append(bodies)

    async with working(pond):
        id_ = await pond.publish("q", 1)
        await became(pond, id_, State.PROCESSING)
        assert pond.worker is not None
        await until(lambda: pond.worker.in_flight == 1)
    found = await row(pond, id_)
    assert (got, found.state, found.deliveries, found.attempts) == ([], State.PENDING, 0, 0)


@on("memory")
async def test_ack_first_in_batches_runs_acked_messages(pond: Millpond) -> None:
    seen = []

    @pond.subscriber("q", batch=10, ack_policy=AckPolicy.ACK_FIRST)
    async def handle(bodies: list[int], deliveries: list[Delivery]) -> None:
        seen.extend([(await row(pond, d.id)).state for d in deliveries])
        await asyncio.sleep(0)
        raise ValueError

    await pond.publish_many("q", range(3))
    await pond.run(until_idle=True, signals=False)
    assert seen == [State.COMPLETED] * 3
