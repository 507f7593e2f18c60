"""What happens is announced once, at the seam; who does not listen does not pay."""

import asyncio
import logging
from typing import Any

import pytest

from millpond import Delivery, Millpond, NackMessage, RejectMessage, State, Store
from millpond.telemetry import (
    Claimed,
    Counters,
    Event,
    LeasesLost,
    Published,
    Reaped,
    Reconnected,
    Settled,
    Telemetry,
    log_event,
)
from millpond.transports.observed import Observed
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
        await until(lambda: sum(e.count for e in events if isinstance(e, Settled)) == 5)
    totals: dict[Any, int] = {}
    for event in events:
        match event:
            case Published(queue, count):
                totals["published", queue] = totals.get(("published", queue), 0) + count
            case Claimed(queue, count, again):
                totals["claimed", queue] = totals.get(("claimed", queue), 0) + count
                totals["again", queue] = totals.get(("again", queue), 0) + again
            case Settled(queue, outcome, count):
                totals[outcome, queue] = totals.get((outcome, queue), 0) + count
            case _:
                pytest.fail(f"nothing of the kind happened: {event}")
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
    pond.telemetry.subscribe(events.append, Published)
    await pond.transport
    scheme, _, rest = url.partition("://")
    engine = sqlalchemy.create_engine(f"{scheme}+{'pysqlite' if scheme == 'sqlite' else 'psycopg'}://{rest}")
    with Session(engine) as session:
        pond.publish_sync("q", 1, within=session)
        session.commit()
    engine.dispose()
    assert events == [Published("q", 1)]


def test_subscribers_hear_what_they_asked_for() -> None:
    telemetry = Telemetry()
    everything: list[Event] = []
    lost: list[Event] = []
    assert not telemetry.wants(Published, Settled)
    forget = telemetry.subscribe(everything.append)
    telemetry.subscribe(lost.append, LeasesLost)
    telemetry.announce(Published("q", 1))
    telemetry.announce(LeasesLost("q", 2))
    forget()
    forget()
    telemetry.announce(LeasesLost("q", 3))
    telemetry.announce(Published("q", 4))
    assert everything == [Published("q", 1), LeasesLost("q", 2)]
    assert lost == [LeasesLost("q", 2), LeasesLost("q", 3)]
    assert telemetry.wants(LeasesLost) and not telemetry.wants(Published)


async def test_a_subscriber_that_raises_breaks_nothing(caplog: pytest.LogCaptureFixture) -> None:
    pond = Millpond("memory://")

    @pond.subscriber("q")
    async def handle(body: int) -> None: ...

    pond.telemetry.subscribe(lambda event: 1 / 0)  # type: ignore[arg-type, return-value]
    async with pond.testing() as test:
        await pond.publish("q", 1)
        assert await test.run() == 1
        assert len(await test.messages("q", State.COMPLETED)) == 1
    assert "ZeroDivisionError" in caplog.text


async def test_nobody_listens_nothing_is_gathered() -> None:
    pond = Millpond("memory://")
    transport = await pond.transport
    assert isinstance(transport, Observed) and isinstance(transport, Store)
    await pond.publish("q", 1)
    await transport.claim(["q"])
    assert transport._queues == {}
    await pond.close()


async def test_what_is_never_settled_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("millpond.transports.observed._MOST", 10)
    pond = Millpond("memory://")
    pond.telemetry.subscribe(Counters())
    transport = await pond.transport
    for _ in range(5):
        await pond.publish_many("q", range(10))
        await transport.claim(["q"], 10)
    assert len(transport._queues) <= 10  # type: ignore[attr-defined]
    await pond.close()


@pytest.mark.parametrize(
    ("event", "level", "words"),
    [
        (LeasesLost("orders", 3), logging.WARNING, "3 leases of 'orders' were lost"),
        (LeasesLost("", 3), logging.WARNING, "3 leases were lost"),
        (Reaped(7), logging.WARNING, "7 messages of dead or hung workers were given back"),
        (Reconnected(2.34), logging.WARNING, "back after 2.3 s"),
        (Published("orders", 2), logging.DEBUG, "orders"),
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
    class Transport:
        on_reconnect: Any = None

        async def reap(self) -> int:
            return 3

    events: list[Event] = []
    telemetry, inner = Telemetry(), Transport()
    telemetry.subscribe(events.append)
    observed = Observed(inner, telemetry)  # type: ignore[arg-type]
    await observed.reap()
    inner.on_reconnect(1.5)
    assert events == [Reaped(3), Reconnected(1.5)]


@on("memory")
async def test_counters(pond: Millpond) -> None:
    counters = Counters()
    pond.telemetry.subscribe(counters)

    @pond.subscriber("q")
    async def handle(body: int) -> None: ...

    async with working(pond):
        await became(pond, await pond.publish("q", 1), State.COMPLETED)
    assert counters.as_dict() == {"published": 1, "claimed": 1, "redelivered": 0, "ack": 1}
