"""One shard of three does not answer: the others go on, and it returns by itself."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

import millpond
from millpond import Ack, Millpond, State, transports
from millpond.clock import monotonic
from millpond.control import Control
from millpond.errors import PartlyPublished, ShardUnavailable, StoreBusy, StoreUnavailable
from millpond.transports.sharded.store import ShardedStore
from servers import Postgres, Proxy
from tests import templates
from tests.shards.conftest import NAMES, keys_of, message
from tests.waiting import until

SHORT: dict[str, Any] = {"reconnect_timeout": 0.2, "call_timeout": 5}


@pytest.fixture
def proxy(postgres_server: Postgres) -> Iterator[Proxy]:
    with Proxy(postgres_server.port) as proxy:
        yield proxy


@pytest.fixture
async def urls(proxy: Proxy, postgres_url: str, tmp_path: Path) -> list[str]:
    """The shard `b` is behind the proxy."""
    found = [f"sqlite:///{tmp_path}/a.db", proxy.url(postgres_url), f"sqlite:///{tmp_path}/c.db"]
    await transports.init_shards(found, names=NAMES, migrate=True)
    return found


@pytest.fixture
async def store(urls: list[str]) -> AsyncIterator[ShardedStore]:
    opened: Any = await millpond.connect(urls, **SHORT)
    yield opened
    await opened.close()


def die(proxy: Proxy) -> None:
    proxy.refuse()
    proxy.cut()


def of_each(store: ShardedStore, count: int) -> list[Any]:
    return [message(key) for name in NAMES for key in keys_of(store, name, count)]


async def published(store: ShardedStore, key: str) -> bool:
    try:
        await store.publish([message(key)])
    except ShardUnavailable:
        return False
    return True


@pytest.mark.usefixtures("patient")
async def test_the_others_go_on_and_it_returns(store: ShardedStore, proxy: Proxy) -> None:
    await store.publish(of_each(store, 3))
    die(proxy)
    (a,), (b,) = keys_of(store, "a", 1), keys_of(store, "b", 1)
    with pytest.raises(ShardUnavailable, match=r"shard b at .* does not answer") as e:
        await store.publish([message(b)])
    assert e.value.shard == "b" and e.value.retryable
    await store.publish([message(a)])
    claims = await store.claim(["q"], 100)
    assert sorted({str(claim.receipt.shard) for claim in claims}) == ["a", "c"] and len(claims) == 7
    assert store.missing_shards == ("b",)
    proxy.accept()
    await until(lambda: published(store, b), "the shard's return")
    assert store.missing_shards == ()
    found: list[Any] = []

    async def rest() -> bool:
        found.extend(await store.claim(["q"], 100))
        return len(found) == 4

    await until(rest)


async def test_counts_and_pages_name_the_missing_shard(store: ShardedStore, proxy: Proxy) -> None:
    await store.publish(of_each(store, 2))
    die(proxy)
    (stats,) = await store.operations.count(["q"])
    assert stats.counts[State.PENDING] == 4 and stats.missing == ("b",)
    assert len(await store.operations.browse("q")) == 4
    with pytest.raises(ShardUnavailable, match="not done on the shards b"):
        await store.operations.pause("q")


@pytest.mark.usefixtures("patient")
async def test_a_pond_connects_without_it(urls: list[str], proxy: Proxy) -> None:
    die(proxy)
    store: Any = await millpond.connect(urls, **SHORT)
    assert store.missing_shards == ("b",)
    (b,) = keys_of(store, "b", 1)
    with pytest.raises(ShardUnavailable):
        await store.publish([message(b)])
    proxy.accept()
    await until(lambda: published(store, b), "the shard's return")
    assert [claim.receipt.shard for claim in await store.claim(["q"], 10)] == ["b"]
    await store.close()


async def test_it_returns_to_a_handle_that_lacks_the_url_of_a_newer_shard(
    urls: list[str], proxy: Proxy, tmp_path: Path
) -> None:
    die(proxy)
    store: Any = await millpond.connect(urls, **SHORT)
    proxy.accept()
    await transports.add_shard([*urls, templates.migrated(tmp_path / "d.db")], "d")
    (b,) = keys_of(store, "b", 1)
    await until(lambda: published(store, b), "the shard's return")
    assert store.missing_shards == ("d",)
    await store.close()


async def test_a_bulk_publish_names_the_written_ids(store: ShardedStore, proxy: Proxy) -> None:
    die(proxy)
    with pytest.raises(PartlyPublished, match="shards b") as e:
        await store.publish(of_each(store, 2))
    assert {row.id for row in await store.operations.browse("q")} == set(e.value.published)
    assert len(e.value.published) == 4


async def test_messages_without_key_and_id_are_placed_elsewhere_if_allowed(urls: list[str], proxy: Proxy) -> None:
    store: Any = await millpond.connect(urls, **SHORT, reroute=True)
    die(proxy)
    (b,) = keys_of(store, "b", 1)
    with pytest.raises(ShardUnavailable):  # the breaker opens, and stays open for the next publish
        await store.publish([message(b)])
    done = await store.publish([message() for _ in range(30)])
    assert len({p.id for p in done}) == 30 and all(p.new for p in done)
    assert {store.members.map.place(None, p.id.bytes) for p in done} == {"a", "c"}
    await store.close()


@pytest.mark.parametrize("moment", ["at its first call", "at a probe"])
async def test_a_message_is_placed_elsewhere_by_the_call_that_finds_the_shard_dead(
    urls: list[str], proxy: Proxy, moment: str
) -> None:
    """It could not be connected to, so no statement was sent."""
    store: Any = await millpond.connect(urls, **SHORT, reroute=True)
    shard = store.members["b"]
    await shard.rest()
    die(proxy)
    (b,) = keys_of(store, "b", 1)
    if moment == "at a probe":
        with pytest.raises(ShardUnavailable) as e:
            await store.publish([message(b)])
        assert e.value.unsent
        await until(lambda: shard.available, "the end of a pause")
    done = await store.publish([message() for _ in range(30)])
    assert len({p.id for p in done}) == 30 and all(p.new for p in done)
    assert {store.members.map.place(None, p.id.bytes) for p in done} == {"a", "c"}
    await store.close()


async def test_a_message_that_may_have_been_sent_stays_with_its_shard(
    store: ShardedStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store, "_reroute", True)

    async def lost(_: Any) -> Any:
        raise StoreUnavailable("the reply was lost")

    inner: Any = store.members["b"].store
    monkeypatch.setattr(inner, "publish_drafts", lost)
    with pytest.raises(PartlyPublished) as e:
        await store.publish([message() for _ in range(30)])
    assert len(e.value.published) < 30


@pytest.mark.usefixtures("patient")
async def test_outcomes_of_the_others_are_written(store: ShardedStore, proxy: Proxy) -> None:
    await store.publish(of_each(store, 2))
    claims = await store.claim(["q"], 6)
    die(proxy)
    with pytest.raises(StoreBusy) as e:
        await store.settle([Ack(claim.receipt) for claim in claims])
    assert {receipt.shard for receipt in e.value.receipts} == {"b"} and len(e.value.receipts) == 2
    (stats,) = await store.operations.count(["q"])
    assert stats.counts[State.COMPLETED] == 4
    proxy.accept()

    async def settled() -> bool:
        try:
            return await store.settle([Ack(receipt) for receipt in e.value.receipts], again=True) == []
        except ShardUnavailable:
            return False

    await until(settled)


async def test_a_silent_shard_holds_up_no_claim(store: ShardedStore, proxy: Proxy) -> None:
    """Its connections stay open, and no answer comes."""
    proxy.black_hole()
    (a,) = keys_of(store, "a", 1)
    try:
        for _ in range(5):
            await store.publish([message(a)])
            (claim,) = await store.claim(["q"], 5)
            assert await store.settle([Ack(claim.receipt)]) == []
    finally:
        proxy.resume()


async def test_a_worker_runs_without_it_and_takes_its_messages_later(urls: list[str], proxy: Proxy) -> None:
    pond = Millpond(urls, **SHORT)
    seen: set[str] = set()

    @pond.subscriber("q", max_poll=0.05)
    async def handle(body: str) -> None:
        seen.add(body)

    store: Any = (await pond.transport)._inner  # type: ignore[attr-defined]
    for name in NAMES:
        await pond.publish("q", name, key=keys_of(store, name, 1)[0])
    die(proxy)
    running = asyncio.create_task(pond.run(signals=False))
    try:
        await until(lambda: running.done() or seen == {"a", "c"}, "the messages of the others")
        proxy.accept()
        await until(lambda: running.done() or "b" in seen, "the messages of the shard that was away")
    finally:
        pond.stop()
        await running
        await pond.close()
    assert seen == set(NAMES)


async def test_why_and_doctor_name_the_missing_shard(store: ShardedStore, proxy: Proxy) -> None:
    found = await store.publish(of_each(store, 1))
    control = Control(store)
    for one in found:
        assert [reason.kind for reason in (await control.why(one.id)).reasons] == ["no-worker"]
    die(proxy)
    reasons = {one.id: [reason.kind for reason in (await control.why(one.id)).reasons] for one in found}
    assert sorted(reasons.values()) == [["no-worker"], ["no-worker"], ["shard-missing", "unknown"]]
    assert "missing-shard" in {finding.kind for finding in await control.doctor()}


@pytest.mark.slow
async def test_a_worker_with_default_options_goes_on_while_a_shard_is_silent(urls: list[str], proxy: Proxy) -> None:
    """It holds a message of the silent shard. Nothing is lost, nothing runs twice, and no other message waits."""
    pond = Millpond(urls)
    seen: list[str] = []
    slow = asyncio.Event()

    @pond.subscriber("q", max_workers=8, max_poll=0.1)
    async def handle(body: str) -> None:
        seen.append(body)
        if body.startswith("slow"):
            await slow.wait()

    store: Any = (await pond.transport)._inner  # type: ignore[attr-defined]
    keys = {name: keys_of(store, name, 1)[0] for name in NAMES}
    running = asyncio.create_task(pond.run(signals=False))
    try:
        for n in range(3):
            await pond.publish("q", f"slow {n}", key=keys["b"])
        await until(lambda: len(seen) == 3)
        proxy.black_hole()
        longest, sent = 0.0, 3
        end = monotonic() + 8  # longer than a beat that gives up
        while monotonic() < end:
            began = monotonic()
            for name in ("a", "c"):
                await pond.publish("q", f"{sent}", key=keys[name])
                sent += 1
            await until(lambda: len(seen) == sent, "the messages of the others")  # noqa: B023
            longest = max(longest, monotonic() - began)
        assert longest < 3.0
        proxy.resume()
        slow.set()
        await until(lambda: not store.missing_shards, "the shard's return")
        await pond.publish("q", "last", key=keys["b"])
        await until(lambda: "last" in seen)

        async def settled() -> bool:
            (stats,) = await store.operations.count(["q"])
            return stats.counts.get(State.COMPLETED) == len(seen) and not stats.missing

        await until(settled)
    finally:
        proxy.resume()
        slow.set()
        pond.stop()
        await running
        await pond.close()
    assert len(seen) == len(set(seen)) == sent + 1
