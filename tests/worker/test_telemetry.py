"""Every event is announced once, by the transport; without subscribers nothing is gathered."""

import asyncio
import copy
import logging
from typing import Any

import pytest

from millpond import Delivery, Millpond, NackMessage, RejectMessage, State
from millpond.telemetry import (
    Counters,
    Event,
    LeasesLost,
    MessagesClaimed,
    MessagesPublished,
    MessagesSettled,
    Reaped,
    Reconnected,
    Telemetry,
    log_event,
)
from millpond.transports.instrumented import Instrumented
from tests.waiting import until
from tests.worker.conftest import became, on, working


async def test_every_event_is_announced_once(pond: Millpond) -> None:
    events: list[Event] = []
    pond.telemetry.subscribe(events.append)

    @pond.subscriber("q", max_workers=1, keep_rejected=False)
    async def handle(body: str, delivery: Delivery) -> None:
        if body == "nack" and delivery.attempt == 1:
            raise NackMessage(delay=0)
        if body == "reject":
            raise RejectMessage
        if body == "by hand":
            await delivery.ack()

    await pond.publish_many("q", ["ack", "nack", "reject", "by hand"])
    await pond.publish("other", 1)
    async with working(pond):
        await until(lambda: sum(e.count for e in events if isinstance(e, MessagesSettled)) == 5)
    totals: dict[Any, int] = {}
    for event in events:
        match event:
            case MessagesPublished(queue, count):
                totals["published", queue] = totals.get(("published", queue), 0) + count
            case MessagesClaimed(queue, count, again):
                totals["claimed", queue] = totals.get(("claimed", queue), 0) + count
                totals["again", queue] = totals.get(("again", queue), 0) + again
            case MessagesSettled(queue, outcome, count):
                totals[outcome, queue] = totals.get((outcome, queue), 0) + count
            case _:
                pytest.fail(f"unexpected event: {event}")
    assert totals == {
        ("published", "q"): 4,
        ("published", "other"): 1,
        ("claimed", "q"): 5,
        ("again", "q"): 1,
        ("ack", "q"): 3,
        ("nack", "q"): 1,
        ("reject", "q"): 1,
    }


@on("memory")
async def test_give_backs_are_announced(pond: Millpond) -> None:
    counters, started = Counters(), asyncio.Event()
    pond.telemetry.subscribe(counters)

    @pond.subscriber("q")
    async def handle(body: int) -> None:
        started.set()
        await asyncio.Event().wait()

    await pond.publish("q", 1)
    async with working(pond, graceful_timeout=0.01):
        await started.wait()
    assert counters["give back"] == 1


@on("sqlite", "postgresql")
async def test_published_within_a_transaction_is_announced(pond: Millpond, url: str) -> None:
    import sqlalchemy
    from sqlalchemy.orm import Session

    events: list[Event] = []
    pond.telemetry.subscribe(events.append, MessagesPublished)
    await pond.transport
    scheme, _, rest = url.partition("://")
    engine = sqlalchemy.create_engine(f"{scheme}+{'pysqlite' if scheme == 'sqlite' else 'psycopg'}://{rest}")
    with Session(engine) as session:
        id_ = pond.publish_sync("q", 1, within=session)
        session.commit()
    engine.dispose()
    (event,) = events
    assert isinstance(event, MessagesPublished) and (event.queue, event.count, event.ids) == ("q", 1, (id_,))
    assert event.seconds > 0


def test_subscribers_receive_the_events_they_asked_for() -> None:
    telemetry = Telemetry()
    everything: list[Event] = []
    lost: list[Event] = []
    assert not telemetry.wants(MessagesPublished, MessagesSettled)
    forget = telemetry.subscribe(everything.append)
    telemetry.subscribe(lost.append, LeasesLost)
    telemetry.announce(MessagesPublished("q", 1))
    telemetry.announce(LeasesLost("q", 2))
    forget()
    forget()
    telemetry.announce(LeasesLost("q", 3))
    telemetry.announce(MessagesPublished("q", 4))
    assert everything == [MessagesPublished("q", 1), LeasesLost("q", 2)]
    assert lost == [LeasesLost("q", 2), LeasesLost("q", 3)]
    assert telemetry.wants(LeasesLost) and not telemetry.wants(MessagesPublished)


async def test_a_subscriber_that_raises_breaks_nothing(caplog: pytest.LogCaptureFixture) -> None:
    pond = Millpond("memory://")

    @pond.subscriber("q")
    async def handle(body: int) -> None: ...

    class Panic(BaseException):
        """As of a library in Rust."""

    def panic(event: Event) -> None:
        raise Panic

    pond.telemetry.subscribe(lambda event: 1 / 0)  # type: ignore[arg-type, return-value]
    pond.telemetry.subscribe(panic)
    async with pond.testing() as test:
        await pond.publish("q", 1)
        assert await test.run() == 1
        assert len(await test.messages("q", State.COMPLETED)) == 1
    assert "ZeroDivisionError" in caplog.text and "Panic" in caplog.text


async def test_without_subscribers_nothing_is_gathered() -> None:
    pond = Millpond("memory://")
    transport = await pond.transport
    assert isinstance(transport, Instrumented)
    await pond.publish("q", 1)
    await transport.claim(["q"])
    assert transport._events._queues == {}
    await pond.close()


async def test_claims_that_are_never_settled_are_forgotten() -> None:
    pond = Millpond("memory://")
    pond.telemetry.subscribe(Counters())
    transport = await pond.transport
    assert isinstance(transport, Instrumented)
    transport._events.most_remembered = 10
    for _ in range(5):
        await pond.publish_many("q", range(10))
        await transport.claim(["q"], 10)
    assert len(transport._events._queues) <= 10
    await pond.close()


@pytest.mark.parametrize(
    ("event", "level", "words"),
    [
        (LeasesLost("orders", 3), logging.WARNING, "leases lost: 3 of 'orders'"),
        (LeasesLost("", 3), logging.WARNING, "leases lost: 3;"),
        (Reaped(7), logging.WARNING, "reaped: 7 messages of dead or hung workers"),
        (Reconnected(2.34), logging.WARNING, "reconnected after 2.3 s"),
        (MessagesPublished("orders", 2), logging.DEBUG, "orders"),
    ],
)
def test_events_as_log_lines(event: Event, level: int, words: str, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG):
        log_event(event)
    (record,) = caplog.records
    assert record.levelno == level
    assert words in record.getMessage()
    assert record.event == type(event).__name__  # type: ignore[attr-defined]


async def test_reaped_and_reconnected_pass_the_seam() -> None:
    class Workers:
        async def reap(self) -> int:
            return 3

    class Inner:
        on_event: Any = None
        workers = Workers()

    events: list[Event] = []
    telemetry, inner = Telemetry(), Inner()
    telemetry.subscribe(events.append)
    instrumented = Instrumented(inner, telemetry)  # type: ignore[arg-type]
    await instrumented.workers.reap()
    inner.on_event(Reconnected(1.5))
    assert events == [Reaped(3), Reconnected(1.5)]


async def test_missing_shards_pass_the_seam() -> None:
    class Inner:
        on_event: Any = None
        missing_shards = ("b",)

    assert Instrumented(Inner(), Telemetry()).missing_shards == ("b",)  # type: ignore[arg-type]


@on("memory")
async def test_an_instrumented_transport_can_be_copied(pond: Millpond) -> None:
    transport = await pond.transport
    assert copy.copy(transport).capabilities == transport.capabilities
    assert not hasattr(transport, "no_such_verb")


@on("memory")
async def test_counters(pond: Millpond) -> None:
    counters = Counters()
    pond.telemetry.subscribe(counters)

    @pond.subscriber("q")
    async def handle(body: int) -> None: ...

    async with working(pond):
        await became(pond, await pond.publish("q", 1), State.COMPLETED)
    assert counters.as_dict() == {"published": 1, "claimed": 1, "redelivered": 0, "ack": 1}
