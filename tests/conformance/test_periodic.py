"""Periodic messages: each time is published once, by whichever process is first; operators change and pause them."""

from __future__ import annotations

import asyncio
import zoneinfo
from datetime import timedelta
from typing import Any

import pytest
from msgspec import structs

from millpond import Capability, ManualClock, Transport, id_from
from millpond.errors import InvalidOption
from millpond.schedule import Periodic
from tests.conformance.backends import requires
from tests.conformance.conftest import Connect
from tests.conformance.messages import message

pytestmark = requires(Capability.PERIODIC)

HOURLY = Periodic(name="report", queue="q", schedule="0 * * * *")


async def times(transport: Transport, queue: str = "q") -> list[str]:
    return [claim.message.headers["periodic-at"][11:16] for claim in await transport.claim([queue], 100)]


async def test_each_time_is_published_once_and_on_time(transport: Transport, clock: ManualClock) -> None:
    await transport.periodic.declare([HOURLY])
    assert await transport.periodic.publish_due() == 3600
    assert await times(transport) == []
    clock.advance(3600)
    assert await transport.periodic.publish_due() == 3600
    assert await transport.periodic.publish_due() == 3600
    assert await times(transport) == ["01:00"]


async def test_many_processes_publish_one_message(connect: Connect, clock: ManualClock) -> None:
    handles = [await connect() for _ in range(4)]
    await asyncio.gather(*(handle.periodic.declare([HOURLY]) for handle in handles))
    clock.advance(timedelta(hours=1))
    await asyncio.gather(*(handle.periodic.publish_due() for handle in handles * 3))
    assert await times(handles[0]) == ["01:00"]


async def test_a_time_that_was_published_is_known_by_its_id(transport: Transport, clock: ManualClock) -> None:
    """The id follows from the name and the time."""
    hour = 1_767_229_200_000_000
    await transport.publish([message(b"null", id=id_from("periodic", "report", hour))])
    await transport.periodic.declare([HOURLY])
    clock.advance(3600)
    await transport.periodic.publish_due()
    assert len(await transport.claim(["q"], 100)) == 1


@pytest.mark.parametrize(
    ("missed", "expected"), [("skip", []), ("once", ["04:00"]), ("all", ["01:00", "02:00", "03:00", "04:00"])]
)
async def test_missed_times(transport: Transport, clock: ManualClock, missed: Any, expected: list[str]) -> None:
    await transport.periodic.declare([Periodic(name="p", queue="q", schedule="0 * * * *", missed=missed)])
    clock.advance(timedelta(hours=4, minutes=30))
    assert await transport.periodic.publish_due() == 1800
    assert await times(transport) == expected


async def test_one_transaction_catches_up_few_times_of_many_schedules(transport: Transport, clock: ManualClock) -> None:
    schedules = [Periodic(name=f"p{n}", queue="q", schedule="every 1", missed="all") for n in range(12)]
    await transport.periodic.declare(schedules)
    clock.advance(600)
    published = []
    wait: float | None = 0
    while wait == 0:
        wait = await transport.periodic.publish_due()
        (stats,) = await transport.operations.count(["q"])
        published.append(stats.counts["PENDING"])
    assert published[0] <= 3 * 1200 < published[-1] == 7200  # 1200 on each shard


@pytest.mark.parametrize("behind", [1, 150])
async def test_schedules_that_are_behind_delay_no_other(transport: Transport, clock: ManualClock, behind: int) -> None:
    """For longer they would miss their times. 150 are more than one transaction reads."""
    await transport.periodic.declare(
        [Periodic(name=f"behind-{n}", queue="behind", schedule="every 1", missed="all") for n in range(behind)]
    )
    clock.advance(timedelta(minutes=59, seconds=30))
    await transport.periodic.declare([structs.replace(HOURLY, missed="skip")])
    clock.advance(30)
    assert await transport.periodic.publish_due() == 0
    assert await times(transport) == ["01:00"]


async def test_an_operators_change_stays_until_the_program_changes(transport: Transport, clock: ManualClock) -> None:
    await transport.periodic.declare([HOURLY])
    assert await transport.periodic.change("report", schedule="30 * * * *", queue="r", missed="skip")
    await transport.periodic.declare([HOURLY])
    (row,) = await transport.periodic.all()
    assert (row.periodic.schedule, row.periodic.queue, row.periodic.missed) == ("30 * * * *", "r", "skip")
    clock.advance(1800)
    await transport.periodic.publish_due()
    assert await times(transport, "r") == ["00:30"]
    await transport.periodic.declare([Periodic(name="report", queue="q", schedule="15 * * * *")])
    (row,) = await transport.periodic.all()
    assert (row.periodic.schedule, row.periodic.queue, row.next_at.minute) == ("15 * * * *", "q", 15)


@pytest.mark.parametrize("missed", ["once", "all"])
async def test_a_due_time_is_published_after_the_declaration_changed(
    transport: Transport, clock: ManualClock, missed: Any
) -> None:
    nightly = Periodic(name="p", queue="q", schedule="0 3 * * *", missed=missed)
    await transport.periodic.declare([nightly])
    clock.advance(timedelta(hours=3, minutes=5))
    await transport.periodic.declare([structs.replace(nightly, payload=b"2", priority=10)])
    assert await transport.periodic.publish_due() == 23 * 3600 + 55 * 60
    (claim,) = await transport.claim(["q"], 100)
    assert (claim.message.payload, claim.message.headers["periodic-at"][11:16]) == (b"2", "03:00")


async def test_a_new_schedule_begins_now(transport: Transport, clock: ManualClock) -> None:
    await transport.periodic.declare([HOURLY])
    clock.advance(timedelta(hours=3, minutes=5))
    await transport.periodic.declare([structs.replace(HOURLY, schedule="30 * * * *")])
    assert await transport.periodic.publish_due() == 25 * 60
    assert await times(transport) == []


@pytest.mark.parametrize("worker_ran", [True, False])
async def test_a_clock_that_was_set_back_stops_no_schedule(
    connect: Connect, clock: ManualClock, worker_ran: bool
) -> None:
    """The database was a year ahead for a while, and the next time is in that year."""
    handle = await connect()
    await handle.periodic.declare([HOURLY])
    clock.advance(3600)
    await handle.periodic.publish_due()
    right = clock.now()
    clock.advance(timedelta(days=365))
    await handle.periodic.publish_due()
    clock._now = right
    if not worker_ran:
        handle = await connect()
    assert await handle.periodic.publish_due() == 0  # corrected: the next call begins with the right time
    assert await handle.periodic.publish_due() == 3600
    clock.advance(3600)
    await handle.periodic.publish_due()
    clock.advance(timedelta(days=365))  # due are all that were published: 01:00, 01:00 of the other year, and 02:00
    assert await times(handle) == ["01:00", "02:00", "01:00"]


async def test_a_schedule_that_this_machine_cannot_compute_delays_no_other(
    transport: Transport, clock: ManualClock, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    wrong = Periodic(name="a", queue="q", schedule="0 * * * *", timezone="Asia/Tokyo")
    await transport.periodic.declare([wrong, HOURLY])
    zones = zoneinfo.ZoneInfo

    def without_tokyo(name: str) -> Any:
        return zones("Missing/Zone" if name == "Asia/Tokyo" else name)

    monkeypatch.setattr(zoneinfo, "ZoneInfo", without_tokyo)
    for _ in range(2):
        clock.advance(3600)
        assert await transport.periodic.publish_due() == 3600
    assert await times(transport) == ["01:00", "02:00"]
    assert caplog.text.count("Asia/Tokyo") == 1
    errors = {row.periodic.name: row.error for row in await transport.periodic.all()}
    assert errors["report"] is None and "Asia/Tokyo" in str(errors["a"])
    assert await transport.periodic.change("a", paused=True)
    assert await transport.periodic.change("a", timezone="UTC", paused=False)
    clock.advance(3600)
    await transport.periodic.publish_due()
    assert (await times(transport)).count("03:00") == 2


async def test_a_pause_publishes_nothing_and_catches_nothing_up(transport: Transport, clock: ManualClock) -> None:
    await transport.periodic.declare([HOURLY])
    assert await transport.periodic.change("report", paused=True)
    clock.advance(timedelta(hours=5))
    assert await transport.periodic.publish_due() is None
    await transport.periodic.declare([Periodic(name="report", queue="q", schedule="*/5 * * * *")])
    assert (await transport.periodic.all())[0].paused
    assert await transport.periodic.change("report", paused=False)
    assert await transport.periodic.publish_due() == 300
    assert await times(transport) == []


async def test_names_that_are_not_there_and_empty_changes(transport: Transport) -> None:
    assert not await transport.periodic.change("nothing", paused=True)
    assert not await transport.periodic.remove("nothing")
    assert await transport.periodic.all() == []
    await transport.periodic.declare([HOURLY])
    with pytest.raises(InvalidOption):
        await transport.periodic.change("report")
    with pytest.raises(InvalidOption):
        await transport.periodic.change("report", schedule="never")
    assert await transport.periodic.remove("report")
    assert await transport.periodic.all() == []
