"""Groups of publishes, over a database that answers when the test wants."""

import asyncio
from collections.abc import Sequence

import pytest

from millpond import Message, Published
from millpond.errors import DataRefused, StoreUnavailable
from millpond.message import Draft, draft
from millpond.transports.database.messages import groups
from millpond.transports.database.messages.groups import PublishGroups, Tries
from tests.waiting import until


class Database:
    """Writes that wait until the test lets them go on."""

    def __init__(self) -> None:
        self.groups: list[list[bytes]] = []
        self.tries: list[Tries] = []
        self.go_on = asyncio.Event()
        self.errors: dict[bytes, Exception] = {}
        self.lose_first = False

    async def write(self, drafts: Sequence[Draft], tries: Tries) -> list[Published]:
        self.groups.append([one.payload for one in drafts])
        self.tries.append(tries)
        await asyncio.sleep(0)
        await self.go_on.wait()
        if self.lose_first and len(drafts) > 1:
            tries.marks.append(7)
            tries.on_lost()
        for one in drafts:
            if one.payload in self.errors:
                raise self.errors[one.payload]
        return [Published(one.id) for one in drafts]


@pytest.fixture
def database() -> Database:
    return Database()


@pytest.fixture
def published(database: Database) -> PublishGroups:
    return PublishGroups(database.write)


def message(body: bytes) -> Draft:
    return draft(Message(queue="q", payload=body))


def start(published: PublishGroups, *bodies: bytes) -> list[asyncio.Task[Published]]:
    return [asyncio.create_task(published.publish(message(body))) for body in bodies]


async def test_the_next_write_takes_all_that_waits(database: Database, published: PublishGroups) -> None:
    calls = start(published, b"a", b"b", b"c")
    await asyncio.sleep(0)
    assert database.groups == [[b"a"]]
    database.go_on.set()
    results = await asyncio.gather(*calls)
    assert database.groups == [[b"a"], [b"b", b"c"]]
    assert len({result.id for result in results}) == 3


async def test_a_publisher_alone_is_written_at_once(database: Database, published: PublishGroups) -> None:
    database.go_on.set()
    for body in (b"a", b"b", b"c"):
        await published.publish(message(body))
    assert database.groups == [[b"a"], [b"b"], [b"c"]]


async def test_publishers_that_wait_for_each_message_form_whole_groups(
    database: Database, published: PublishGroups
) -> None:
    async def publish() -> None:
        for _ in range(10):
            await published.publish(message(b"x"))

    database.go_on.set()
    await asyncio.gather(*(publish() for _ in range(64)))
    assert len(database.groups) <= 13


async def test_groups_are_bounded(
    database: Database, published: PublishGroups, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(groups, "GROUP_MESSAGES", 3)
    monkeypatch.setattr(groups, "GROUP_BYTES", 10)
    database.go_on.set()
    calls = start(published, b"first", b"1", b"2", b"3", b"4", b"5" * 8, b"6" * 8, b"7" * 99)
    await asyncio.gather(*calls)
    assert database.groups == [[b"first"], [b"1", b"2", b"3"], [b"4", b"5" * 8], [b"6" * 8], [b"7" * 99]]


async def test_each_caller_gets_the_error_of_its_own_message(database: Database, published: PublishGroups) -> None:
    database.errors = {b"3": DataRefused("three"), b"6": DataRefused("six")}
    database.go_on.set()
    calls = start(published, *(b"%d" % n for n in range(8)))
    results = await asyncio.gather(*calls, return_exceptions=True)
    assert [str(r) if isinstance(r, Exception) else "" for r in results] == ["", "", "", "three", "", "", "six", ""]


async def test_a_lost_database_is_not_asked_again_for_each_message(
    database: Database, published: PublishGroups
) -> None:
    database.errors = {b"3": StoreUnavailable("gone")}
    database.go_on.set()
    results = await asyncio.gather(*start(published, b"0", b"1", b"2", b"3"), return_exceptions=True)
    assert [type(result) for result in results] == [Published, *[StoreUnavailable] * 3]
    assert len({id(result) for result in results[1:]}) == 3, "each caller has an exception of its own"
    assert len(database.groups) == 2


async def test_a_part_of_a_group_whose_reply_was_lost_is_looked_up(
    database: Database, published: PublishGroups
) -> None:
    database.errors = {b"2": DataRefused("two")}
    database.lose_first = True
    database.go_on.set()
    await asyncio.gather(*start(published, b"0", b"1", b"2"), return_exceptions=True)
    assert database.groups == [[b"0"], [b"1", b"2"], [b"1"], [b"2"]]
    assert [tries.lost for tries in database.tries] == [False, True, True, True]
    assert database.tries[2].marks == database.tries[3].marks == [7]


async def test_a_cancelled_caller_leaves_the_write_alone(database: Database, published: PublishGroups) -> None:
    first, early, taken, other = start(published, b"first", b"early", b"taken", b"other")
    await asyncio.sleep(0)
    early.cancel()
    await asyncio.wait([early])
    database.go_on.set()
    await first
    database.go_on.clear()
    await until(lambda: len(database.groups) == 2)
    taken.cancel()
    await asyncio.wait([taken])
    database.go_on.set()
    await other
    assert database.groups == [[b"first"], [b"taken", b"other"]]


async def test_a_cancelled_first_caller_starts_the_next_write(database: Database, published: PublishGroups) -> None:
    first, other = start(published, b"first", b"other")
    await asyncio.sleep(0)
    first.cancel()
    await asyncio.wait([first])
    database.go_on.set()
    await other
    assert database.groups == [[b"first"], [b"other"]]


async def test_a_write_that_hangs_is_overtaken(database: Database, published: PublishGroups) -> None:
    calls = start(published, b"hangs", b"a", b"b")
    await until(lambda: len(database.groups) == 2)
    assert database.groups == [[b"hangs"], [b"a", b"b"]]
    calls += start(published, b"c")
    await until(lambda: len(database.groups) == 3)
    database.go_on.set()
    await asyncio.gather(*calls)


async def test_flush_waits_for_all(database: Database, published: PublishGroups) -> None:
    calls = start(published, b"a", b"b")
    await asyncio.sleep(0)
    flush = asyncio.create_task(published.flush())
    await asyncio.sleep(0)
    assert not flush.done()
    database.go_on.set()
    await flush
    assert all(call.done() for call in calls) or len(await asyncio.gather(*calls)) == 2
