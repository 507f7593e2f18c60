"""Close: idempotent; afterwards every verb says so. What a transport cannot do, it says as clearly."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from uuid import uuid4

import pytest

from millpond import Ack, Capability, Receipt, Store, Unsupported
from millpond.errors import Closed
from tests.conformance.conftest import Connect
from tests.conformance.messages import claim_one, message, publish

RECEIPT = Receipt(uuid4(), 1)

VERBS: dict[str, tuple[Capability, Callable[[Store], Awaitable[object]]]] = {
    "publish": (Capability(0), lambda t: t.publish([message()])),
    "publish nothing": (Capability(0), lambda t: t.publish([])),
    "claim": (Capability(0), lambda t: t.claim(["q"])),
    "claim by id": (Capability.CLAIM_BY_ID, lambda t: t.claim(["q"], ids=[uuid4()])),
    "extend": (Capability.EXTEND, lambda t: t.extend([RECEIPT])),
    "settle": (Capability(0), lambda t: t.settle([Ack(RECEIPT)])),
    "wait": (Capability(0), lambda t: t.wait(["q"], 0)),
    "count": (Capability.BROWSE, lambda t: t.count()),
    "browse": (Capability.BROWSE, lambda t: t.browse()),
    "find": (Capability.BROWSE, lambda t: t.find([uuid4()])),
    "archived": (Capability.ARCHIVE, lambda t: t.archived()),
    "reschedule": (Capability.RESCHEDULE, lambda t: t.reschedule([uuid4()], delay=1)),
    "cancel": (Capability.RESCHEDULE, lambda t: t.cancel([uuid4()])),
    "pause": (Capability.PAUSE, lambda t: t.pause("q")),
    "resume": (Capability.PAUSE, lambda t: t.resume("q")),
    "retain": (Capability.ARCHIVE, lambda t: t.retain("q", completed=1, failed=None)),
    "purge": (Capability.ARCHIVE, lambda t: t.purge(older_than=0)),
    "replay": (Capability.ARCHIVE, lambda t: t.replay([], name="again")),
    "reap": (Capability(0), lambda t: t.reap()),
    "join": (Capability.PRESENCE, lambda t: t.join()),
}


@pytest.mark.parametrize("verb", VERBS)
async def test_after_close_every_verb_says_so(transport: Store, verb: str) -> None:
    """ORB-C1, ORB-C11, VT-C7"""
    capability, call = VERBS[verb]
    await transport.close()
    with pytest.raises(Closed if capability in transport.capabilities else (Closed, Unsupported)):
        await call(transport)


async def test_closing_twice_is_harmless(transport: Store) -> None:
    """VT-C10, FS-C20"""
    await transport.close()
    await transport.close()
    await asyncio.gather(transport.close(), transport.close())


async def test_closing_one_handle_leaves_the_others(transport: Store, connect: Connect) -> None:
    other = await connect()
    await publish(transport)
    await transport.close()
    claim = await claim_one(other)
    assert await other.settle([Ack(claim.receipt)]) == []


async def test_close_while_calls_are_under_way(transport: Store) -> None:
    """ORB-C11: close while publishing is safe: each call ends, with its result or with `Closed`"""
    calls = [asyncio.create_task(transport.publish([message()])) for _ in range(10)]
    await asyncio.sleep(0)
    await transport.close()
    for result in await asyncio.gather(*calls, return_exceptions=True):
        assert isinstance(result, list | Closed), result


@pytest.mark.parametrize("verb", VERBS)
async def test_what_it_cannot_do_it_says(transport: Store, verb: str) -> None:
    capability, call = VERBS[verb]
    if capability in transport.capabilities:
        await call(transport)
    else:
        with pytest.raises(Unsupported, match=str(capability.name)):
            await call(transport)


async def test_without_transactions_within_is_refused(transport: Store) -> None:
    if Capability.TRANSACTIONS in transport.capabilities:
        return  # tests/transactions
    for call in (
        lambda: transport.publish([message()], within=object()),
        lambda: transport.settle([Ack(RECEIPT)], within=object()),
    ):
        with pytest.raises(Unsupported, match="TRANSACTIONS"):
            await call()
    with pytest.raises(Unsupported, match="TRANSACTIONS"):
        transport.publish_sync([message()], within=object())
    with pytest.raises(Unsupported, match="TRANSACTIONS"):
        transport.settle_sync([Ack(RECEIPT)], within=object())
    assert await transport.claim(["q"]) == []
