"""Messages between a worker and its child process arrive as they were sent."""

import io
from datetime import UTC, datetime, timedelta
from uuid import uuid4

import msgspec
import pytest

from millpond import Ack, GiveBack, Message, Nack, Receipt, Reject
from millpond.message import Claim
from millpond.telemetry import LeasesLost, MessagesSettled
from millpond.worker import child_messages as wire

RECEIPT = Receipt(uuid4(), 2**63 - 1)
MESSAGE = Message(
    queue="orders",
    payload=b"\x00\xff",
    id=RECEIPT.id,
    key="kunde-ä",
    due_at=datetime(2026, 11, 18, 3, 0, 0, 5, tzinfo=UTC),
    expires=timedelta(minutes=1, microseconds=1),
    headers={"trace": "x", "nested": [1, 2.5, {"none": None}], "large": -(10**30)},
)


@pytest.mark.parametrize(
    "message",
    [
        wire.Run(Claim(MESSAGE, RECEIPT, 3, 1, 1, 2, 3, 4, crashes=2)),
        wire.Settle(Ack(RECEIPT, keep=False), decided_in_transaction=True),
        wire.Settle(Nack(RECEIPT, 0.25, "ValueError: 💥"), decided_in_transaction=False),
        wire.Write(Reject(RECEIPT, "why", attempted=False)),
        wire.Settle(GiveBack(RECEIPT, delivered=True, delay=timedelta(seconds=2)), decided_in_transaction=False),
        wire.Announce(MessagesSettled("orders", "ack", 1, ids=(RECEIPT.id,), seconds=0.5)),
        wire.Announce(LeasesLost("orders", 2)),
        wire.Lost(RECEIPT, announced=True),
        wire.ReceiptStale(RECEIPT),
        wire.WriteAnswer(ours=False),
        wire.Idle(),
    ],
    ids=lambda message: type(message).__name__,
)
def test_a_message_arrives_as_it_was_sent(message: wire.ToChild | wire.ToWorker) -> None:
    file = io.BytesIO(wire.pack(message))
    assert wire.read(file) == message
    assert wire.read(file) is None, "the end of the socket"


def test_a_header_that_json_lacks_arrives_too() -> None:
    """RabbitMQ has them of other publishers. An integer of any size may be beside it."""
    headers = {"not a number": float("nan"), "infinite": float("-inf"), "large": [10**30]}
    message = msgspec.structs.replace(MESSAGE, headers=headers)
    file = io.BytesIO(wire.pack(wire.Run(Claim(message, RECEIPT, 3, 1, 1, 2, 3, 4))))
    run = wire.read(file)
    assert isinstance(run, wire.Run) and repr(run.claim.message.headers) == repr(headers)


def test_half_of_a_surrogate_pair_in_an_error_does_not_stop_its_outcome() -> None:
    file = io.BytesIO(wire.pack(wire.Settle(Nack(RECEIPT, 1, "ValueError: \ud800"), False)))
    assert wire.read(file) == wire.Settle(Nack(RECEIPT, 1, "ValueError: ?"), False)  # type: ignore[comparison-overlap]
