"""An application with a handler of every kind; its pond is at the URL in the environment."""

import asyncio
import json
import logging
import os
import threading
import time
from collections.abc import Callable
from typing import Any

from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine

from millpond import (
    AckPolicy,
    Delivery,
    Message,
    Millpond,
    NackMessage,
    RejectMessage,
    Retry,
    current_delivery,
    telemetry,
)

URL, DRIVER_URL = "EVERY_HANDLER_URL", "EVERY_HANDLER_DRIVER_URL"
HEARTBEAT = 0.5
pond = Millpond(os.environ.get(URL, "memory://"))
engine = create_async_engine(os.environ.get(DRIVER_URL, "sqlite+aiosqlite://"))
log = logging.getLogger("shop")
hooks: list[str] = []


def note(name: str, **facts: Any) -> None:
    with open("notes", "a") as file:
        file.write(json.dumps({"name": name, "pid": os.getpid(), **facts}) + "\n")


def subscriber(**options: Any) -> Callable[[Any], Any]:
    """Declare a handler of the queue with its name."""
    options = {"heartbeat": HEARTBEAT, "retry": Retry.constant(3600), **options}
    return lambda function: pond.subscriber(function.__name__, **options)(function)


@pond.on_start
async def started() -> None:
    hooks.append("started")


@pond.redact
def redact(text: str) -> str:
    return text.replace("secret", "(removed)")


def count(event: Any) -> None:
    note("settled", queue=event.queue, outcome=event.outcome, count=event.count)


pond.telemetry.subscribe(count, telemetry.MessagesSettled)


@subscriber()
async def returns(body: Any, delivery: Delivery, message: Message, headers: Any) -> None:
    log.info("shipping")
    note(
        "returns",
        body=body,
        headers=headers,
        key=message.key,
        priority=message.priority,
        attempt=delivery.attempt,
        lease=delivery.lease,
        correlation_id=delivery.correlation_id,
        current=current_delivery() is delivery,
        hooks=hooks,
    )


@subscriber()
def returns_in_thread(body: Any, delivery: Delivery) -> None:
    note("returns in thread", current=current_delivery() is delivery, thread=threading.current_thread().name)


@subscriber()
async def raises(body: Any) -> None:
    raise ValueError("a secret")


@subscriber()
def raises_in_thread(body: Any) -> None:
    raise SystemExit("a secret")


@subscriber()
async def nacks(body: Any) -> None:
    raise NackMessage("not yet", delay=1800)


@subscriber()
async def rejects(body: Any) -> None:
    raise RejectMessage("never a secret")


@subscriber(ack_policy=AckPolicy.REJECT_ON_ERROR)
async def fails_at_once(body: Any) -> None:
    raise ValueError


@subscriber(ack_policy=AckPolicy.ACK_FIRST)
async def is_acked_first(body: Any) -> None:
    raise ValueError("too late")


@subscriber(ack_policy=AckPolicy.MANUAL)
async def decides_nothing(body: Any) -> None: ...


@subscriber(ack_policy=AckPolicy.MANUAL)
async def acks(body: Any, delivery: Delivery) -> None:
    await delivery.ack()
    await delivery.reject()  # the first decision counts
    raise ValueError("after the decision")


@subscriber()
async def nacks_by_hand(body: Any, delivery: Delivery) -> None:
    await delivery.nack(1800, error="a secret")


@subscriber()
def rejects_in_thread(body: Any, delivery: Delivery) -> None:
    delivery.reject_sync("a secret")


@subscriber(keep_acked=False)
async def leaves_no_trace(body: Any) -> None: ...


@subscriber(batch=10, gather=1)
async def batches(bodies: list[Any], deliveries: list[Delivery]) -> None:
    note("batches", bodies=bodies, count=len(deliveries))


@subscriber(batch=10)
def batches_in_thread(bodies: list[Any]) -> None:
    raise ValueError("all of them")


@subscriber()
async def cannot_decode(body: int) -> None: ...


@subscriber(timeout=0.5)
async def exceeds_its_timeout(body: Any) -> None:
    await asyncio.sleep(600)


@subscriber(timeout=0.5)
def exceeds_its_timeout_in_thread(body: Any) -> None:
    time.sleep(600)


@subscriber()
async def publishes(body: Any) -> None:
    await pond.publish("published", 1)


@subscriber()
def publishes_in_thread(body: Any) -> None:
    pond.publish_sync("published", 2)


@subscriber()
async def acks_in_a_transaction(body: Any, delivery: Delivery) -> None:
    async with AsyncSession(engine) as session:
        note("once", first=await delivery.once("effect", within=session))
        await delivery.ack(within=session)
        await session.commit()
    await asyncio.sleep(4 * HEARTBEAT)  # the worker finds the stale receipt meanwhile
    note("runs on", lost=delivery.lost, interrupted=delivery.interrupted)


@subscriber()
async def rolls_back(body: Any, delivery: Delivery) -> None:
    async with AsyncSession(engine) as session:
        await delivery.ack(within=session)
        await session.rollback()


@subscriber()
async def nacks_in_a_transaction(body: Any, delivery: Delivery) -> None:
    async with AsyncSession(engine) as session:
        await delivery.nack(1800, within=session)
        await session.commit()
