"""Steps of handlers outside of transactions: one delivery that lives owns a step, and only its result is stored."""

from __future__ import annotations

import pytest

from millpond import Ack, GiveBack, ManualClock, Message, Nack
from millpond.errors import BodyTooLarge, MillpondError
from millpond.message import Claim
from millpond.seam.workers import message_step, scoped_step
from millpond.transports.database.store import DatabaseStore
from tests.stores import Connect

STEP = scoped_step("order-7", "charge")
DAY = 86_400


async def claimed(store: DatabaseStore, number: int = 1, lease: float = 30) -> list[Claim]:
    await store.publish([Message(queue="q", payload=b"x") for _ in range(number)])
    return await store.claim(["q"], limit=number, lease=lease)


async def begin(store: DatabaseStore, claim: Claim, step: object = STEP) -> tuple[str, bytes | None]:
    answer = await store.workers.begin_step(claim.receipt, step)  # type: ignore[arg-type]
    return answer.state, answer.result


async def test_one_delivery_owns_a_step_and_all_get_its_result(store: DatabaseStore, connect: Connect) -> None:
    one, two = await claimed(store, 2)
    other = await connect()
    assert await begin(store, one) == ("owned", None)
    assert await begin(store, one) == ("owned", None)
    assert await begin(other, two) == ("held", None)
    assert not await other.workers.finish_step(two.receipt, STEP, b"2")
    assert await store.workers.finish_step(one.receipt, STEP, b"1")
    assert await store.workers.finish_step(one.receipt, STEP, b"1")  # after a lost reply
    assert await begin(other, two) == ("done", b"1")
    await store.settle([Ack(one.receipt)])
    assert await begin(other, two) == ("done", b"1")


async def test_steps_of_other_names_scopes_and_messages_are_free(store: DatabaseStore) -> None:
    one, two = await claimed(store, 2)
    assert await begin(store, one) == ("owned", None)
    for step in (
        scoped_step("order-7", "mail"),
        scoped_step("order-8", "charge"),
        message_step(one.receipt.id, "charge"),
        message_step(two.receipt.id, "charge"),
    ):
        assert await begin(store, two, step) == ("owned", None)
    assert scoped_step("a b", "c").key != scoped_step("a", "b c").key


@pytest.mark.parametrize("end", ["ack", "nack", "give back", "reap"])
async def test_the_end_of_a_delivery_releases_its_steps(store: DatabaseStore, clock: ManualClock, end: str) -> None:
    one, two = await claimed(store, 2, lease=60)
    assert await begin(store, one) == ("owned", None)
    await store.extend([two.receipt], 3 * DAY)
    match end:
        case "ack":
            await store.settle([Ack(one.receipt)])
        case "nack":
            await store.settle([Nack(one.receipt, delay=5)])
        case "give back":
            await store.settle([GiveBack(one.receipt)])
        case "reap":
            clock.advance(61)
            assert await begin(store, two) == ("held", None)  # the receipt is current until it is reaped
            assert await store.workers.reap() == 1
    assert await begin(store, two) == ("owned", None)
    assert await begin(store, one) == ("stale", None)
    assert not await store.workers.finish_step(one.receipt, STEP, b"late")
    assert await store.workers.finish_step(two.receipt, STEP, b"2")


async def test_a_second_delivery_of_a_message_takes_its_step_over(store: DatabaseStore, clock: ManualClock) -> None:
    (first,) = await claimed(store, lease=1)
    step = message_step(first.receipt.id, "charge")
    assert await begin(store, first, step) == ("owned", None)
    clock.advance(2)
    await store.workers.reap()
    (second,) = await store.claim(["q"])
    assert await begin(store, second, step) == ("owned", None)
    assert not await store.workers.finish_step(first.receipt, step, b"1")
    assert await store.workers.finish_step(second.receipt, step, b"2")


async def test_purge_forgets_steps_of_messages_that_are_gone(store: DatabaseStore, clock: ManualClock) -> None:
    one, two = await claimed(store, 2, lease=100 * DAY)
    mail = scoped_step("order-7", "mail")
    for claim, step in ((one, STEP), (two, mail)):
        assert await begin(store, claim, step) == ("owned", None)
        assert await store.workers.finish_step(claim.receipt, step, b"1")
    await store.settle([Ack(one.receipt)])
    await store.operations.purge("q", older_than=0)
    (three,) = await claimed(store, lease=100 * DAY)
    assert await begin(store, three) == ("done", b"1")
    clock.advance(8 * DAY)
    await store.operations.purge("q", older_than=0)
    assert await begin(store, three) == ("owned", None)
    assert await begin(store, three, mail) == ("done", b"1")


async def test_a_result_that_is_larger_than_a_body_is_refused(store: DatabaseStore) -> None:
    """MariaDB closes the connection for one that exceeds max_allowed_packet."""
    (claim,) = await claimed(store)
    assert await begin(store, claim) == ("owned", None)
    for size in (1024 * 1024 + 1, 20_000_000):
        with pytest.raises(BodyTooLarge, match="step 'charge'"):
            await store.workers.finish_step(claim.receipt, STEP, b"1" * size)
    assert await begin(store, claim) == ("owned", None)
    assert await store.workers.finish_step(claim.receipt, STEP, b"1" * 1024 * 1024)


@pytest.mark.parametrize("wrong", ["", "a\0b", "x" * 300])
def test_a_name_is_a_short_text(wrong: str) -> None:
    with pytest.raises(MillpondError):
        scoped_step(wrong, "charge")
    with pytest.raises(MillpondError):
        scoped_step("order-7", wrong)
