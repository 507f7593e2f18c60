"""Tokens and operators' actions, on every transport that keeps them."""

from __future__ import annotations

import pytest

from millpond import Capability, ManualClock, Transport
from millpond.errors import InvalidQueue
from millpond.seam.access import Action, StoredToken
from tests.conformance.backends import requires

pytestmark = requires(Capability.ACCESS)


def token(name: str, **more: object) -> StoredToken:
    values = {"id": name[:8], "name": name, "hash": "0" * 64, "roles": ("read",), "queues": ("*",), **more}
    return StoredToken(**values)  # type: ignore[arg-type]


async def test_tokens_are_added_replaced_and_removed(transport: Transport) -> None:
    access = transport.access
    assert await access.tokens() == []
    await access.add_token(token("b'; --", id="1", roles=("publish", "read"), queues=("orders.*", "é")))
    await access.add_token(token("a", id="2"))
    found = await access.tokens()
    assert [(t.name, t.roles, t.queues) for t in found] == [
        ("a", ("read",), ("*",)),
        ("b'; --", ("publish", "read"), ("orders.*", "é")),
    ]
    assert all(t.created_us > 0 for t in found)
    await access.add_token(token("a", id="3", hash="1" * 64))
    assert {t.name: t.hash[0] for t in await access.tokens()} == {"a": "1", "b'; --": "0"}
    assert await access.remove_token("a")
    assert not await access.remove_token("a")
    assert [t.name for t in await access.tokens()] == ["b'; --"]
    with pytest.raises(InvalidQueue):
        await access.add_token(token(""))


async def test_the_end_of_a_token_is_remembered(transport: Transport) -> None:
    access = transport.access
    await access.reset_tokens()
    assert not await access.had_tokens()
    await access.add_token(token("a", expires_us=1))
    assert await access.tokens() == [] and await access.had_tokens()
    await access.add_token(token("a", id="2"))
    assert await access.remove_token("a") and await access.tokens() == [] and await access.had_tokens()
    await access.add_token(token("a", id="3"))
    assert [t.id for t in await access.tokens()] == ["3"]
    await access.reset_tokens()
    assert await access.tokens() == [] and not await access.had_tokens()


async def test_an_expired_token_is_not_listed(transport: Transport, clock: ManualClock) -> None:
    await transport.access.add_token(token("soon"))
    (stored,) = await transport.access.tokens()
    await transport.access.add_token(token("soon", expires_us=stored.created_us + 5_000_000))
    assert len(await transport.access.tokens()) == 1
    clock.advance(6)
    assert await transport.access.tokens() == []


async def test_actions_are_listed_newest_first(transport: Transport, clock: ManualClock) -> None:
    for number in range(3):
        await transport.access.record(Action(actor="anna", action="pause", queue="q", detail=f'{{"n": {number}}}'))
        clock.advance(1)
    await transport.access.record(Action(actor="x" * 999, action="purge", detail="\x00" + "é" * 9000))
    found = await transport.access.actions(3)
    assert [action.action for action in found] == ["purge", "pause", "pause"]
    assert [action.detail for action in found[1:]] == ['{"n": 2}', '{"n": 1}']
    assert len(found[0].actor) == 255 and "\x00" not in found[0].detail
    assert await transport.access.actions(0) == []
