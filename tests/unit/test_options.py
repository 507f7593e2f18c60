"""Options of stores and of `memory://`, checked by name and value."""

from __future__ import annotations

import asyncio
import gc
import os
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest

import millpond
from millpond import ManualClock, Message, Millpond
from millpond.errors import InvalidOption, InvalidTime, InvalidURL, Unsupported
from millpond.transports.database.options import StoreOptions, parse


def test_defaults() -> None:
    options = parse({})
    assert options == StoreOptions()
    assert (options.pool_size, options.body_limit, options.dedupe_for) == (10, 1024 * 1024, 7 * 86_400)


@pytest.mark.parametrize(
    ("given", "match"),
    [
        ({"pol_size": 3}, "pool_size"),
        ({"zzz": 3}, "there are .*pool_size"),
        ({"pool_size": 0}, "pool_size"),
        ({"pool_size": True}, "pool_size"),
        ({"pool_size": "3"}, "pool_size"),
        ({"body_limit": 0}, "body_limit"),
        ({"body_limit": 1 << 40}, "body_limit"),
        ({"busy_timeout": "x"}, "busy_timeout"),
        ({"migrate": "no"}, "migrate"),
        ({"pooler": "no"}, "pooler"),
        ({"tls": "yes"}, "tls"),
        ({"notify": "no"}, "notify"),
        ({"clock": 5}, "clock must be"),
    ],
)
def test_what_is_refused(given: dict[str, Any], match: str) -> None:
    with pytest.raises(InvalidOption, match=match):
        parse(given)


@pytest.mark.parametrize("name", ["dedupe_for", "busy_timeout", "reconnect_timeout", "call_timeout"])
def test_times(name: str) -> None:
    assert getattr(parse({name: timedelta(seconds=2)}), name) == timedelta(seconds=2)
    with pytest.raises(InvalidTime, match=name):
        parse({name: -1})


# --- memory -----------------------------------------------------------------------------------------------


async def test_memory_without_a_name_is_private() -> None:
    one, two = await millpond.connect("memory://"), await millpond.connect("memory://")
    await one.publish([Message(queue="q", payload=b"")])
    assert await two.claim(["q"]) == []


async def test_memory_with_a_name_is_shared_until_the_last_is_closed() -> None:
    one, two = await millpond.connect("memory://shared"), await millpond.connect("memory://shared")
    other = await millpond.connect("memory://other")
    await one.publish([Message(queue="q", payload=b"")])
    assert await other.claim(["q"]) == []
    await one.close()
    assert len(await two.claim(["q"])) == 1
    await two.close()
    again = await millpond.connect("memory://shared")
    assert await again.claim(["q"]) == []


async def test_options_of_a_shared_memory_are_the_first_ones() -> None:
    clock = ManualClock()
    one = await millpond.connect("memory://options", clock=clock)
    await (await millpond.connect("memory://options")).close()
    await (await millpond.connect("memory://options", clock=clock)).close()
    with pytest.raises(InvalidOption, match="other options"):
        await millpond.connect("memory://options", clock=ManualClock())
    await one.close()


# Since Python 3.13 the connections of the forgotten handle warn that they were not closed.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
async def test_a_named_memory_ends_with_a_handle_that_is_forgotten() -> None:
    await (await millpond.connect("memory://forgotten")).publish([Message(queue="q", payload=b"")])
    gc.collect()
    again = await millpond.connect("memory://forgotten")
    assert await again.claim(["q"]) == []
    await again.close()


@pytest.mark.parametrize("given", [{"pool_size": 3}, {"body_limit": 0}, {"body_limit": True}, {"nonsense": 1}])
async def test_wrong_options_of_memory(given: dict[str, Any]) -> None:
    with pytest.raises(InvalidOption):
        await millpond.connect("memory://", **given)
    with pytest.raises(InvalidOption):
        Millpond("memory://", **given)


def test_wrong_options_of_rabbitmq_are_errors_at_construction() -> None:
    with pytest.raises(InvalidOption, match="nonsense"):
        Millpond("amqp://localhost", nonsense=1)
    with pytest.raises(InvalidOption, match="archive_options: unknown option 'schem'"):
        Millpond("amqp://localhost", archive="sqlite:///a.db", archive_options={"schem": "x"})


EVERY_URL = [
    "memory://",
    "sqlite:///orders.db",
    "postgresql://host/shop",
    "mysql://host/shop",
    "mariadb://host/shop",
    "amqp://host",
]


@pytest.mark.parametrize("url", EVERY_URL)
@pytest.mark.parametrize("given", [{"nonsense": 1}, {"body_limit": 0}, {"body_limit": "1"}, {"clock": 5}])
def test_wrong_options_are_errors_at_construction(url: str, given: dict[str, Any]) -> None:
    with pytest.raises(InvalidOption, match=next(iter(given))):
        Millpond(url, **given)


@pytest.mark.parametrize("url", EVERY_URL)
def test_wrong_parameters_of_a_url_are_errors_at_construction(url: str) -> None:
    with pytest.raises(InvalidURL, match="unknown parameter 'nonsense'"):
        Millpond(f"{url}?nonsense=1")


@pytest.mark.parametrize("url", ["sqlite://", "sqlite:///", "sqlite:///:memory:", "mysql://host", "mysql:///shop"])
def test_urls_without_a_database_are_errors_at_construction(url: str) -> None:
    with pytest.raises(InvalidURL, match="names no"):
        Millpond(url)


def test_a_pond_without_a_url_is_an_error() -> None:
    """Messages in memory end with the process: that is asked for, not a default."""
    for nothing in (None, ""):
        with pytest.raises(InvalidURL, match="memory:// for messages that end with the process"):
            Millpond(nothing)  # type: ignore[arg-type]
    with pytest.raises(InvalidURL, match="memory:// for messages that end with the process"):
        Millpond()


# --- a pond in memory -------------------------------------------------------------------------------------


def test_messages_in_memory_live_as_long_as_the_pond() -> None:
    """A script that calls asyncio.run for each step, and publishes without an event loop."""
    pond = Millpond("memory://")
    got: list[str] = []

    @pond.subscriber("q")
    async def handle(body: str) -> None:
        got.append(body)
        if body == "first":
            pond.publish_sync("q", "in the event loop")

    asyncio.run(pond.publish("q", "first"))
    gc.collect()
    pond.publish_sync("q", "without a loop")
    asyncio.run(pond.run(until_idle=True))
    assert sorted(got) == ["first", "in the event loop", "without a loop"]
    pond.close_sync()


async def test_ponds_in_memory_are_private() -> None:
    one, two = Millpond("memory://"), Millpond("memory://")
    await one.publish("q", 1)
    assert await (await two.transport).claim(["q"]) == []
    assert "memory://" in repr(one)
    await one.close()
    await two.close()


async def test_memory_is_an_error_in_another_process() -> None:
    transport = await millpond.connect("memory://forked")
    pond = Millpond("memory://")
    await pond.publish("q", 1)

    def publish_in_child() -> bytes:
        for publish in (transport.publish([Message(queue="q", payload=b"")]), pond.publish("q", 1)):
            try:
                publish.send(None)
                return b"published"
            except Unsupported as e:
                if "SHARED" not in str(e):
                    return str(e).encode()
        return b"two errors"

    assert in_fork(publish_in_child) == b"two errors"
    assert len(await (await pond.transport).claim(["q"])) == 1
    await pond.close()
    await transport.close()


def in_fork(work: Callable[[], bytes]) -> bytes:
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.write(writing, work())
        except BaseException as e:
            os.write(writing, repr(e).encode())
        finally:
            os._exit(0)
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        result = pipe.read()
    os.waitpid(child, 0)
    return result
