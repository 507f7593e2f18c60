"""Options of stores and of the memory, checked by name and value."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest

import millpond
from millpond import ManualClock, Message
from millpond.clock import DatabaseClock
from millpond.errors import InvalidOption, InvalidTime
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


async def test_memory_has_no_database_to_ask_for_the_time() -> None:
    with pytest.raises(InvalidOption, match="SystemClock"):
        await millpond.connect("memory://", clock=DatabaseClock())


@pytest.mark.parametrize("given", [{"pool_size": 3}, {"body_limit": 0}, {"body_limit": True}])
async def test_what_memory_refuses(given: dict[str, Any]) -> None:
    with pytest.raises(InvalidOption):
        await millpond.connect("memory://", **given)
