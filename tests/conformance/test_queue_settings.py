"""Settings with the queue: stored, read, and obeyed by nacks without a delay."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec import UNSET

from millpond import ManualClock, Nack, Retry, State, Transport
from millpond.errors import InvalidOption, InvalidTime
from millpond.seam.settings import QueueSettings
from millpond.seam.transport import Capability
from tests.conformance.backends import requires
from tests.conformance.messages import claim_one, publish, row

POLICY = Retry(initial=2, multiplier=3, step=0.5, maximum=60, jitter=0, attempts=3, total=3600, first="backoff")
pytestmark = requires(Capability.SETTINGS)


async def test_settings_are_read_as_they_were_written(transport: Transport) -> None:
    operations = transport.operations
    assert await operations.settings(["q", "other"]) == [QueueSettings(queue="q"), QueueSettings(queue="other")]
    assert await operations.settings() == []
    await operations.configure("q", lease=90, retry=POLICY, max_crashes=0, max_deliveries=7)
    await operations.retain("q", completed=60, failed=None)
    await operations.pause("q")
    written = QueueSettings(
        queue="q",
        paused=True,
        lease_us=90_000_000,
        retry=POLICY,
        max_crashes=0,
        max_deliveries=7,
        keep_completed_us=60_000_000,
    )
    assert await operations.settings() == [written]
    assert await operations.has_queue("q")
    await operations.configure("q", retry=Retry(attempts=None))
    assert (await operations.settings(["q"]))[0].retry == Retry(attempts=None)
    await operations.configure("q", lease=None, retry=None, max_crashes=None)
    (left,) = await operations.settings(["q"])
    assert (left.lease, left.retry, left.max_crashes, left.max_deliveries) == (None, None, None, 7)


@pytest.mark.parametrize(
    ("wrong", "error"),
    [
        ({"lease": 0}, InvalidTime),
        ({"lease": -1}, InvalidTime),
        ({"retry": 3}, InvalidOption),
        ({"retry": Retry(never=(ValueError,))}, InvalidOption),
        ({"max_crashes": -1}, InvalidOption),
        ({"max_deliveries": True}, InvalidOption),
        ({}, InvalidOption),
        ({"lease": UNSET}, InvalidOption),
    ],
)
async def test_wrong_settings_are_refused(transport: Transport, wrong: dict[str, Any], error: type[Exception]) -> None:
    with pytest.raises(error):
        await transport.operations.configure("q", **wrong)
    assert await transport.operations.settings() == []


async def test_a_nack_without_a_delay_obeys_the_policy_of_its_queue(transport: Transport, clock: ManualClock) -> None:
    await transport.operations.configure("q", retry=POLICY)
    await publish(transport)
    for wait in (2, 6.5):
        claim = await claim_one(transport)
        assert await transport.settle([Nack(claim.receipt, error="busy")]) == []
        assert (await row(transport, claim.receipt.id)).state is State.RETRYABLE
        clock.advance(wait - 0.5)
        assert await transport.claim(["q"]) == []
        clock.advance(0.5)
    claim = await claim_one(transport)
    assert await transport.settle([Nack(claim.receipt, error="busy")]) == []
    last = await row(transport, claim.receipt.id)
    assert (last.state, last.reason, last.error, last.attempts) == (State.FAILED, "retries used up", "busy", 3)
    # After a lost reply the same settle succeeds.
    assert await transport.settle([Nack(claim.receipt, error="busy")]) == []


async def test_a_nack_is_settled_again_after_a_lost_reply(transport: Transport) -> None:
    await transport.operations.configure("q", retry=Retry(attempts=2))
    await publish(transport)
    claim = await claim_one(transport)
    for _ in range(2):
        assert await transport.settle([Nack(claim.receipt)]) == []
    found = await row(transport, claim.receipt.id)
    assert (found.state, found.attempts) == (State.RETRYABLE, 1)


async def test_a_stale_nack_is_refused_whatever_the_policy_says(transport: Transport, clock: ManualClock) -> None:
    await transport.operations.configure("q", retry=Retry.none())
    await publish(transport)
    claim = await claim_one(transport, lease=1)
    clock.advance(2)
    newer = await claim_one(transport)
    assert await transport.settle([Nack(claim.receipt)]) == [claim.receipt]
    assert (await row(transport, claim.receipt.id)).state is State.PROCESSING
    assert await transport.settle([Nack(newer.receipt)]) == []
    assert (await row(transport, claim.receipt.id)).state is State.FAILED


async def test_a_given_delay_and_other_queues_ignore_the_policy(transport: Transport) -> None:
    await transport.operations.configure("other", retry=Retry.none())
    for queue, outcome in (("q", {}), ("other", {"delay": 0})):
        await publish(transport, queue=queue)
        for n in range(3):
            (claim,) = await transport.claim([queue])
            assert claim.attempts == n
            assert await transport.settle([Nack(claim.receipt, **outcome)]) == []
