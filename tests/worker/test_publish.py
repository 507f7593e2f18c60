"""Publishing by a pond: the caller sees whether a message is new; URLs of other libraries work."""

from __future__ import annotations

import sqlite3
from typing import Any
from uuid import UUID

import psycopg
import pymysql
import pytest

from millpond import Millpond, Publish, PublishedId, State, id_from
from millpond.errors import InvalidMessage, InvalidOption
from millpond.transports.url import Url
from tests.worker.conftest import counts, on

NIGHTLY = id_from("nightly")


async def test_a_repeated_publish_is_visible(pond: Millpond) -> None:
    @pond.subscriber("q")
    async def handle(body: int) -> None: ...

    first = await pond.publish("q", 1, id=NIGHTLY)
    assert (first, first.new) == (NIGHTLY, True)
    second = await pond.publish("q", 2, id=NIGHTLY)
    assert (second, second.new) == (NIGHTLY, False)
    await pond.run(until_idle=True, signals=False)
    third = await pond.publish("q", 3, id=NIGHTLY)
    assert not third.new, "also after the first was handled"
    assert await counts(pond) == {State.COMPLETED: 1}
    plain = await pond.publish("q", 4)
    assert plain.new and type(plain) is PublishedId


async def test_a_repeated_publish_of_many_is_visible(pond: Millpond) -> None:
    await pond.publish("q", 1, id=NIGHTLY)
    ids = await pond.publish_many("q", [2, 3, 3], ids=[NIGHTLY, id_from("other"), id_from("other")])
    assert [(id_ == NIGHTLY, id_.new) for id_ in ids] == [(True, False), (False, True), (False, False)]
    assert all(id_.new for id_ in await pond.publish_many("q", [4, 5]))


async def test_a_repeated_publish_of_synchronous_code_is_visible(pond: Millpond) -> None:
    assert pond.publish_sync("q", 1, id=NIGHTLY).new
    assert not pond.publish_sync("q", 2, id=NIGHTLY).new


def _driver(url: str) -> Any:
    parts = Url(url)
    if parts.scheme == "sqlite":
        return sqlite3.connect(parts.path[1:])
    if parts.scheme == "postgresql":
        return psycopg.connect(url)
    return pymysql.connect(
        host=parts.host,
        port=parts.port or 3306,
        user=parts.user,
        password=parts.password or "",
        database=parts.path[1:],
    )


@on("sqlite", "postgresql", "mariadb")
async def test_a_repeated_publish_within_a_transaction_is_visible(pond: Millpond) -> None:
    await pond.publish("q", 1, id=NIGHTLY)
    connection = _driver(pond.url.raw)
    try:
        assert not pond.publish_sync("q", 2, id=NIGHTLY, within=connection).new
        other = pond.publish_sync("q", 2, id=id_from("other"), within=connection)
        assert other.new and isinstance(other, UUID)
        connection.commit()
    finally:
        connection.close()


@on("sqlite", "postgresql", "mariadb")
async def test_urls_of_sqlalchemy_work(pond: Millpond) -> None:
    drivers = {"sqlite": "aiosqlite", "postgresql": "asyncpg", "mysql": "aiomysql"}
    scheme, _, rest = pond.url.raw.partition("://")
    theirs = Millpond(f"{scheme}+{drivers[scheme]}://{rest}")
    await theirs.publish("q", 1)
    await theirs.close()
    assert await counts(pond) == {State.PENDING: 1}


async def test_a_broker_has_no_memory_of_ids(rabbitmq_url: str) -> None:
    """Without the capability DEDUPE each publish is new."""
    pond = Millpond(rabbitmq_url)
    try:
        for _ in range(2):
            assert (await pond.publish("q", 1, id=NIGHTLY)).new
    finally:
        await pond.close()


@pytest.mark.parametrize("given", [[], [print], [("a", "b")], [["a"]], [7], [None, "a"]])
def test_a_decorator_without_a_queue_raises_at_its_line(given: list[Any]) -> None:
    pond = Millpond("memory://")
    with pytest.raises(InvalidOption, match=r'needs the name of its queue, as text: @pond.subscriber\("orders"\)'):
        pond.subscriber(*given)
    assert pond.subscriptions == []


@on("memory")
async def test_publish_many_has_no_options_of_one_body(pond: Millpond) -> None:
    options: dict[str, Any] = {"unique": "a"}
    for publish in (pond.publish_many, pond.publish_many_sync):
        with pytest.raises(InvalidOption, match=r"no option 'unique'; .*Publish\(body, …\) has the options of one"):
            await publish("q", [1, 2], **options)


@on("memory")
async def test_an_unknown_option_is_named_with_the_nearest_one(pond: Millpond) -> None:
    @pond.subscriber("q")
    def handle(body: int) -> None: ...

    unknown: dict[str, Any] = {"dely": 3}
    calls = [
        lambda: pond.publish("q", 1, **unknown),
        lambda: pond.publish_sync("q", 1, **unknown),
        lambda: pond.publish_many("q", [1], **unknown),
        lambda: pond.publish_many_sync("q", [1], **unknown),
        lambda: handle.publish(1, **unknown),
        lambda: handle.publish_many([1], **unknown),
    ]
    for call in calls:
        with pytest.raises(InvalidOption, match=r"^publish(_many)? has no option 'dely'; the nearest one is 'delay'$"):
            await call()


@on("memory")
async def test_rules_of_unique_messages_need_unique(pond: Millpond) -> None:
    for rule in ({"on_conflict": "replace"}, {"while_": "unfinished"}, {"while_": 60}):
        options: Any = rule
        with pytest.raises(InvalidMessage, match="give unique, too"):
            await pond.publish("q", 1, **options)
        with pytest.raises(InvalidMessage, match="give unique, too"):
            await pond.publish_many("q", [Publish(1, **options)])
    assert await counts(pond) == {}
