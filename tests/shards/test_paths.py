"""Each shard has its own path for claims, beats and outcomes: one that is silent delays no other."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest

from millpond import Ack, Millpond, State
from millpond.errors import MillpondError
from millpond.transports.sharded import claims as claims_module
from millpond.transports.sharded import presence as presence_module
from millpond.transports.sharded.presence import ShardedPresence
from millpond.transports.sharded.store import ShardedStore
from tests.shards.conftest import NAMES, keys_of, message
from tests.triggers import execute
from tests.waiting import until


class Gate:
    """Holds up one verb of a shard's store until it is opened."""

    def __init__(self, store: ShardedStore, shard: str, verb: str, patch: pytest.MonkeyPatch) -> None:
        self.open = asyncio.Event()
        self.calls = 0
        inner: Any = store.members[shard].store
        call = getattr(inner, verb)

        async def held_up(*args: Any, **options: Any) -> Any:
            self.calls += 1
            await self.open.wait()
            return await call(*args, **options)

        patch.setattr(inner, verb, held_up)


def of_each(store: ShardedStore, count: int, names: list[str] = NAMES) -> list[Any]:
    return [message(key) for name in names for key in keys_of(store, name, count)]


async def states(store: ShardedStore, shard: str) -> dict[Any, int]:
    inner = store.members[shard].store
    assert inner is not None
    return {state: count for stats in await inner.operations.count() for state, count in stats.counts.items() if count}


# --- claims ---------------------------------------------------------------------------------------------


async def test_a_claim_waits_shortly_for_a_silent_shard_and_then_no_more(
    store: ShardedStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    grace = 3.0  # the others answer within it also on a busy machine
    monkeypatch.setattr(claims_module, "_GRACE", grace)
    monkeypatch.setattr(claims_module, "_LEAST_GRACE", grace)
    monkeypatch.setattr(claims_module, "_KEPT_FOR", 60.0)
    await store.publish(of_each(store, 40))
    gate = Gate(store, "b", "claim", monkeypatch)
    found = await store.claim(["q"], 12)
    assert {claim.receipt.shard for claim in found} == {"a", "c"}
    claimed = 0
    began = time.monotonic()
    for _ in range(10):
        claimed += len(await store.claim(["q"], 6))
    assert claimed >= 40 and time.monotonic() - began < 10 * grace  # not a grace period for each
    gate.open.set()


async def test_a_late_answer_wakes_a_wait_and_is_claimed_next(
    store: ShardedStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(claims_module, "_KEPT_FOR", 60.0)
    await store.publish(of_each(store, 3, ["b"]))
    gate = Gate(store, "b", "claim", monkeypatch)
    assert await store.claim(["q"], 9) == []
    waiting = asyncio.create_task(store.wait(["q"], 60))
    await asyncio.sleep(0)
    gate.open.set()
    await waiting
    found = await store.claim(["q"], 9)
    assert [claim.receipt.shard for claim in found] == ["b"] * 3
    assert await store.settle([Ack(claim.receipt) for claim in found]) == []


async def test_late_messages_that_no_claim_takes_go_back(store: ShardedStore, monkeypatch: pytest.MonkeyPatch) -> None:
    await store.publish(of_each(store, 3, ["b"]))
    await store.workers.join()
    gate = Gate(store, "b", "claim", monkeypatch)
    assert await store.claim(["q"], 9, by_worker=True) == []
    assert gate.calls == 1
    gate.open.set()

    async def is_back() -> bool:
        rows = await store.operations.browse("q")
        return [(row.state, row.deliveries) for row in rows] == [(State.PENDING, 0)] * 3

    await until(is_back, "the messages of the late answer")


@pytest.mark.usefixtures("patient")
async def test_a_suspect_goes_back_if_its_claim_is_cancelled_while_others_go_back(
    urls: list[str], store: ShardedStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    suspect, _ = await store.publish([message(*keys_of(store, name, 1)) for name in "ab"])
    execute(urls[0], "UPDATE millpond_message SET crashes = 2")
    back, real = asyncio.Event(), store._claims._back.finished

    async def held_up(within: float) -> None:
        back.set()
        await asyncio.Event().wait()

    monkeypatch.setattr(store._claims._back, "finished", held_up)
    claiming = asyncio.create_task(store.claim(["q"], 10, lease=3600))
    await back.wait()
    claiming.cancel()
    await asyncio.wait([claiming])
    monkeypatch.setattr(store._claims._back, "finished", real)

    async def waits_again() -> bool:
        return (await states(store, "a")).get(State.PENDING) == 1

    await until(waits_again)
    (claim,) = await store.claim(["q"], 10, others=False)
    assert claim.message.id == suspect.id and claim.deliveries == 1


async def test_claimed_ids_go_back_if_another_shard_refuses(
    store: ShardedStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    published = await store.publish(of_each(store, 1))
    inner: Any = store.members["b"].store
    monkeypatch.setattr(inner, "claim", refuse)
    with pytest.raises(MillpondError, match="refused"):
        await store.claim(["q"], 10, lease=3600, ids=[one.id for one in published])

    async def waits_again() -> bool:
        return (await states(store, "a")).get(State.PENDING) == 1

    await until(waits_again)


async def refuse(*args: Any, **options: Any) -> Any:
    raise MillpondError("refused")


async def test_a_shard_that_refuses_claims_is_named_and_the_others_are_claimed(
    store: ShardedStore, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    await store.publish(of_each(store, 4))
    inner: Any = store.members["b"].store

    async def refused(*args: Any, **options: Any) -> Any:
        raise MillpondError("no right to claim")

    with monkeypatch.context() as patched, caplog.at_level(logging.WARNING, "millpond"):
        patched.setattr(inner, "claim", refused)
        for _ in range(4):
            assert {claim.receipt.shard for claim in await store.claim(["q"], 2)} <= {"a", "c"}
    lines = [one.getMessage() for one in caplog.records]
    assert lines == ["shard b refuses claims, its messages wait: no right to claim"]
    assert [finding.kind for finding in await store.diagnosis.examine()].count("refused-claims") == 1

    async def claimed_from_b() -> bool:
        return "b" in {claim.receipt.shard for claim in await store.claim(["q"], 9)}

    await until(claimed_from_b, "the shard that takes claims again")
    assert "refused-claims" not in {finding.kind for finding in await store.diagnosis.examine()}


# --- beats ----------------------------------------------------------------------------------------------


class FakePresence:
    """A presence whose beats may hang or fail."""

    def __init__(self) -> None:
        self.id = 1
        self.dead_after = 1.0
        self.beats = 0
        self.gate = asyncio.Event()
        self.gate.set()
        self.result = True

    async def beat(self) -> bool:
        await self.gate.wait()
        self.beats += 1
        return self.result

    def announce_stop(self) -> None: ...

    async def leave(self) -> None: ...


@pytest.fixture
def fakes(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Any]]:
    """Three presences, and a clock that the test sets."""
    clock = [1000.0]
    monkeypatch.setattr(presence_module, "monotonic", lambda: clock[0])
    yield {"clock": clock, **{name: FakePresence() for name in NAMES}}


def presence_of(fakes: dict[str, Any]) -> ShardedPresence:
    presence = ShardedPresence(1.0)
    for name in NAMES:
        presence.add(name, fakes[name])
    return presence


async def test_beats_of_the_others_do_not_wait_for_a_silent_shard(fakes: dict[str, Any]) -> None:
    presence = presence_of(fakes)
    assert await presence.beat() and [fakes[name].beats for name in NAMES] == [1, 1, 1]
    fakes["b"].gate.clear()
    for _ in range(4):
        fakes["clock"][0] += 0.5
        async with asyncio.timeout(30):
            assert await presence.beat()
    assert [fakes[name].beats for name in NAMES] == [5, 1, 5]
    assert [presence.may_claim(name, 1.0) for name in NAMES] == [True, False, True]
    assert presence.cut_off == {"b"}
    fakes["b"].gate.set()
    assert await presence.beat()
    await until(lambda: fakes["b"].beats == 2)
    # Other workers may have taken its messages: nothing is claimed from it before that is known.
    await until(lambda: list(presence.doubtful) == ["b"])
    await presence.beat()
    assert not presence.may_claim("b", 1.0) and presence.cut_off == frozenset()
    silence = presence.doubtful["b"]
    presence.trust("b", silence - 1)  # the check of an earlier silence proves nothing
    assert not presence.may_claim("b", 1.0)
    presence.trust("b", silence)
    assert presence.may_claim("b", 1.0)
    await presence.leave()


async def test_a_shard_without_beats_is_not_claimed_from(fakes: dict[str, Any]) -> None:
    """Pooled connections may work while the session of the beats cannot be opened."""
    presence = presence_of(fakes)
    fakes["b"].result = False
    assert await presence.beat()
    assert [presence.may_claim(name, 60.0) for name in NAMES] == [True, False, True]
    fakes["b"].result = True
    assert await presence.beat()
    assert all(presence.may_claim(name, 60.0) for name in NAMES)
    await presence.leave()


async def test_concurrent_claims_join_a_shard_once(store: ShardedStore, monkeypatch: pytest.MonkeyPatch) -> None:
    presence: Any = await store.workers.join()
    shard = store.members["b"]
    inner: Any = shard.store
    joins = 0
    join = inner.workers.join

    async def counted(*args: Any, **options: Any) -> Any:
        nonlocal joins
        joins += 1
        await asyncio.sleep(0)
        return await join(*args, **options)

    monkeypatch.setattr(inner.workers, "join", counted)
    del presence._parts["b"]
    await asyncio.gather(store.workers.hold(shard), store.workers.hold(shard), store.workers.hold(shard))
    assert joins == 1 and presence.joined == set(NAMES)
    await presence.leave()


async def test_a_silent_shard_holds_up_no_reaper_and_no_cancel(
    store: ShardedStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = asyncio.Event()
    inner: Any = store.members["b"].store

    async def silent() -> Any:
        await opened.wait()
        return 0

    await store.publish(of_each(store, 1, ["a"]))
    await store.claim(["q"], 1, 0.001)
    monkeypatch.setattr(inner.workers, "reap", silent)
    monkeypatch.setattr(inner.workers, "cancel_requests", silent)
    reaped = 0

    async def reap() -> bool:
        nonlocal reaped
        reaped += await store.workers.reap()
        return reaped == 1

    await until(reap)
    assert await store.workers.cancel_requests() == {}
    opened.set()


# --- a worker -------------------------------------------------------------------------------------------


@contextlib.asynccontextmanager
async def working(pond: Millpond) -> AsyncIterator[None]:
    running = asyncio.create_task(pond.run(signals=False))
    try:
        yield
    finally:
        pond.stop()
        await running
        await pond.close()


async def test_outcomes_of_the_others_are_written_while_one_shard_is_silent(
    urls: list[str], store: ShardedStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    pond = Millpond(urls)
    seen: list[str] = []

    @pond.subscriber("q", max_workers=4, max_poll=0.05)
    async def handle(body: str) -> None:
        seen.append(body)

    own: Any = (await pond.transport)._inner  # type: ignore[attr-defined]
    gate = Gate(own, "b", "settle", monkeypatch)
    await store.publish([message(key, b'"b"') for key in keys_of(store, "b", 3)])
    async with working(pond):
        await until(lambda: gate.calls > 0)
        for name in ("a", "c"):
            await store.publish([message(key, b'"x"') for key in keys_of(store, name, 50)])

        async def settled() -> bool:
            return [await states(store, name) for name in ("a", "c")] == [{State.COMPLETED: 50}] * 2

        await until(settled, "the outcomes of the others")
        assert (await states(store, "b")).keys() == {State.PROCESSING}
        assert pond.worker is not None and pond.worker.ready
        gate.open.set()

        async def all_settled() -> bool:
            return await states(store, "b") == {State.COMPLETED: 3}

        await until(all_settled)
    assert len(seen) == 103


async def test_hung_handlers_of_the_others_are_detached_while_one_shard_is_silent(
    urls: list[str], store: ShardedStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A message of a handler that hangs comes back after a lease, also if another shard does not answer."""
    from millpond.worker.leases import HeldLeases

    presence: Any = await store.workers.join()
    await store.publish(of_each(store, 1))
    claims = await store.claim(["q"], 3, by_worker=True)
    inner: Any = store.members["b"].store
    opened = asyncio.Event()

    async def silent(receipts: Any) -> Any:
        await opened.wait()
        return []

    monkeypatch.setattr(inner.workers, "stale", silent)
    deliveries = [_Delivery(claim) for claim in claims]
    pool: Any = _Pool(deliveries)
    leases = HeldLeases([pool], presence)
    leases.check_now()
    async with asyncio.timeout(30):
        await leases.keep(store, lambda *_: None)
    rows = {row.id: row for row in await store.operations.find([claim.receipt.id for claim in claims])}
    detached = {d.claim.receipt.shard for d in deliveries if rows[d.claim.receipt.id].lease_us is not None}
    assert leases.safe and detached >= {"a", "c"}
    opened.set()
    await leases.close()
    await presence.leave()


class _Delivery:
    lost = False

    def __init__(self, claim: Any) -> None:
        self.claim = claim


class _Pool:
    """A pool whose handlers all hang."""

    class subscription:
        heartbeat_s = 0.0

    def __init__(self, deliveries: list[Any]) -> None:
        self.held = set(deliveries)

    def take_abandoned(self) -> list[Any]:
        return []

    def kept_and_hung(self) -> tuple[list[Any], list[Any]]:
        return [], list(self.held)

    def drop_refused(self, receipts: Any) -> None: ...
