"""A unique message whose publish was committed and its reply lost: the store's own retry does not double it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest

import millpond
from millpond import Ack, Claim, Message, Published, Unique
from millpond.transports.database.sql.dialect import ErrorKind
from tests.shared import KINDS, empty_database


class ReplyLost(Exception):
    """The server committed, and its reply did not arrive."""


@pytest.fixture(params=KINDS)
def url(request: pytest.FixtureRequest) -> str:
    return empty_database(request, request.param)


@pytest.fixture
async def store(url: str) -> AsyncIterator[Any]:
    store = await millpond.connect(url, migrate=True)
    yield store
    await store.close()


def unique(body: bytes = b"mine", **options: Any) -> Message:
    return Message(queue="q", payload=body, unique=Unique("v", **options))


async def publish_with_a_lost_reply(
    store: Any, monkeypatch: pytest.MonkeyPatch, message: Message, meanwhile: Callable[[], Awaitable[Any]]
) -> Published:
    """Publish; between the commit and the retry other callers do their work."""
    run, kind = store.runner.engine.run, store.dialect.error_kind
    lost = False

    async def lose_reply(steps: Any, *mode: Any) -> Any:
        nonlocal lost
        result = await run(steps, *mode)
        if not lost:
            lost = True
            await meanwhile()
            raise ReplyLost
        return result

    with monkeypatch.context() as patch:
        patch.setattr(store.runner.engine, "run", lose_reply)
        patch.setattr(store.dialect, "error_kind", lambda e: ErrorKind.LOST if isinstance(e, ReplyLost) else kind(e))
        (published,) = await store.publish([message])
    return published


async def claimed(store: Any) -> Claim:
    (claim,) = await store.claim(["q"])
    return claim  # type: ignore[no-any-return]


async def handle(store: Any, **options: Any) -> Claim:
    claim = await claimed(store)
    assert await store.settle([Ack(claim.receipt, **options)]) == []
    return claim


async def test_another_message_had_the_value_meanwhile(store: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    async def meanwhile() -> None:
        assert not (await handle(store)).redelivered
        await store.publish([unique(b"another")])
        await handle(store)

    published = await publish_with_a_lost_reply(store, monkeypatch, unique(), meanwhile)
    assert published.new
    assert await store.claim(["q"]) == []


async def test_the_free_value_was_purged_meanwhile(store: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    async def meanwhile() -> None:
        await handle(store)
        await store.operations.purge()

    published = await publish_with_a_lost_reply(store, monkeypatch, unique(), meanwhile)
    assert published.new
    assert await store.claim(["q"]) == []


async def test_the_message_still_runs_and_another_has_the_value(store: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    claims = []

    async def meanwhile() -> None:
        claims.append(await claimed(store))
        await store.publish([unique(b"another")])
        claims.append(await claimed(store))

    published = await publish_with_a_lost_reply(store, monkeypatch, unique(), meanwhile)
    assert published == Published(claims[0].receipt.id)
    assert await store.settle([Ack(claim.receipt) for claim in claims]) == []
    assert await store.claim(["q"]) == []


async def test_a_message_that_was_handled_without_a_trace_is_flagged(
    store: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def meanwhile() -> None:
        await handle(store, keep=False)
        await store.publish([unique(b"another")])
        await handle(store)

    await publish_with_a_lost_reply(store, monkeypatch, unique(), meanwhile)
    assert (await claimed(store)).redelivered


async def test_a_body_that_was_handled_in_the_place_of_another_is_flagged(
    store: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    await store.publish([unique(b"first")])

    async def meanwhile() -> None:
        assert (await handle(store)).message.payload == b"mine"

    await publish_with_a_lost_reply(store, monkeypatch, unique(on_conflict="replace"), meanwhile)
    assert (await claimed(store)).redelivered


async def test_the_value_is_still_taken(store: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    (first,) = await store.publish([unique(b"first")])

    async def meanwhile() -> None:
        pass

    published = await publish_with_a_lost_reply(store, monkeypatch, unique(), meanwhile)
    assert published == Published(first.id, False, "kept")
