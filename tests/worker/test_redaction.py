"""Error texts and reasons are stored without secrets: passwords of URLs always, the rest by `@pond.redact`."""

import re

import pytest

from millpond import AckPolicy, Delivery, Millpond, NackMessage, RejectMessage, Retry, State
from millpond.errors import InvalidOption

CARD = "4111111111111111"
LEAK = f"no answer from postgresql://shop:hunter2@db/shop for card {CARD}"


def pond_with(name: str) -> Millpond:
    pond = Millpond("memory://")

    @pond.subscriber("raises", retry=Retry.none())
    async def raises(body: str) -> None:
        raise ValueError(LEAK)

    @pond.subscriber("retried", retry=Retry.constant(60))
    async def retried(body: str) -> None:
        raise NackMessage(LEAK)

    @pond.subscriber("rejects")
    async def rejects(body: str) -> None:
        raise RejectMessage(LEAK)

    @pond.subscriber("decides", ack_policy=AckPolicy.MANUAL)
    async def decides(body: str, delivery: Delivery) -> None:
        await delivery.reject(LEAK)

    @pond.subscriber("nacks", ack_policy=AckPolicy.MANUAL)
    async def nacks(body: str, delivery: Delivery) -> None:
        await delivery.nack(60, error=LEAK)

    @pond.subscriber("undecodable")
    async def undecodable(body: int) -> None:
        raise AssertionError

    assert [s.queues for s in pond.of_queues([name])] == [(name,)]
    return pond


async def stored(pond: Millpond, queue: str) -> str:
    """Reason and error of one message after its handler ran."""
    async with pond.testing(raise_errors=False) as test:
        await pond.publish(queue, f"text for card {CARD}")
        await test.run(queue)
        (row,) = await test.messages(queue)
    assert row.state in (State.FAILED, State.RETRYABLE)
    return f"{row.reason} {row.error}"


QUEUES = ("raises", "retried", "rejects", "decides", "nacks")


@pytest.mark.parametrize("queue", QUEUES)
async def test_passwords_of_urls_are_never_stored(queue: str) -> None:
    text = await stored(pond_with(queue), queue)
    assert "hunter2" not in text and "postgresql://shop:***@db/shop" in text and CARD in text


@pytest.mark.parametrize("queue", [*QUEUES, "undecodable"])
async def test_the_function_of_the_pond_removes_the_rest(queue: str) -> None:
    pond = pond_with(queue)

    @pond.redact
    def without_cards(text: str) -> str:
        return re.sub(r"\d{16}", "(card)", text)

    text = await stored(pond, queue)
    assert CARD not in text and "hunter2" not in text
    assert pond.redacted(LEAK) == "no answer from postgresql://shop:***@db/shop for card (card)"


@pytest.mark.parametrize("queue", QUEUES)
@pytest.mark.parametrize("fails", [lambda text: 1 / 0, lambda text: None])
async def test_a_text_is_removed_if_the_function_fails(queue: str, fails: object) -> None:
    pond = pond_with(queue)
    pond.redact(fails)  # type: ignore[arg-type]
    text = await stored(pond, queue)
    assert CARD not in text and "hunter2" not in text and "redact function" in text


def test_a_function_is_needed() -> None:
    with pytest.raises(InvalidOption, match="redact needs a function"):
        Millpond("memory://").redact("card")  # type: ignore[arg-type]
