"""Steps of a handler: work outside of transactions that is done once by every delivery that sees its result."""

from __future__ import annotations

from concurrent.futures import Future
from typing import Any
from uuid import UUID

import msgspec

from millpond.codec import encode
from millpond.errors import BodyNotEncodable
from millpond.outcome import StepHeld
from millpond.seam.workers import Step, StepClaim

_running: dict[tuple[int, UUID], Future[None]] = {}
"""The steps that run now, by the delivery's `id()` and the step's id."""


def begin_run(delivery: object, step: Step) -> Future[None] | None:
    """The run of this step by another task or thread of the delivery, to be waited for; None: the caller's begins."""
    mine: Future[None] = Future()
    mine.set_running_or_notify_cancel()  # a caller that is cancelled while it waits does not end it
    running = _running.setdefault((id(delivery), step.id), mine)
    return None if running is mine else running


def end_run(delivery: object, step: Step) -> None:
    _running.pop((id(delivery), step.id)).set_result(None)


def stored_result(claim: StepClaim, step: Step) -> bytes | None:
    """The result if the step is done, None if this delivery owns it."""
    if claim.state == "held":
        raise StepHeld(f"another delivery has step {step.name!r} of {step.scope!r}")
    return claim.result


def encode_result(value: Any, step: Step) -> bytes:
    """The result as JSON, in which form every delivery gets it."""
    if isinstance(value, bytes | bytearray | memoryview):
        raise BodyNotEncodable(f"the result of step {step.name!r} is bytes; return values that JSON has")
    return msgspec.json.encode(value) if isinstance(value, str) else encode(value)[0]


def decode_result(result: bytes) -> Any:
    return msgspec.json.decode(result)
