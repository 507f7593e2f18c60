"""Each reason why a message does not run, staged on a real database."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest

import millpond
from millpond import Ack, GiveBack, ManualClock, Message, Nack, Reject, Transport
from millpond.control import Control, Why
from millpond.control.why import ORDER
from tests import templates
from tests.control.held import held_transaction
from tests.shared import KINDS, empty_database


@pytest.fixture(params=KINDS)
def url(request: pytest.FixtureRequest) -> str:
    return empty_database(request, request.param)


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
async def store(url: str, clock: ManualClock) -> AsyncIterator[Transport]:
    store = await millpond.connect(url, migrate=True, clock=clock)
    yield store
    await store.close()


async def publish(store: Transport, **more: Any) -> Any:
    (published,) = await store.publish([Message(**{"queue": "q", "payload": b"1", **more})])
    return published.id


def kinds(why: Why) -> list[str]:
    for reason in why.reasons:
        assert reason.text
    return [reason.kind for reason in why.reasons]


async def test_an_unknown_id(store: Transport) -> None:
    why = await Control(store).why(uuid4())
    assert kinds(why) == ["unknown"] and "never committed" in why.reasons[0].text


async def test_an_id_that_is_only_remembered(store: Transport) -> None:
    id_ = await publish(store, id=uuid4())
    (claim,) = await store.claim(["q"])
    await store.settle([Ack(claim.receipt, keep=False)])
    why = await Control(store).why(id_)
    assert kinds(why) == ["unknown"] and "is gone" in why.reasons[0].text


@pytest.mark.parametrize(("outcome", "text"), [(Ack, "completed"), (lambda r: Reject(r, "no such sku"), "no such sku")])
async def test_settled(store: Transport, outcome: Callable[[Any], Any], text: str) -> None:
    id_ = await publish(store)
    (claim,) = await store.claim(["q"])
    await store.settle([outcome(claim.receipt)])
    why = await Control(store).why(id_)
    assert kinds(why) == ["settled"] and text in why.reasons[0].text


async def test_a_retried_message_names_the_new_one(store: Transport) -> None:
    id_ = await publish(store)
    (claim,) = await store.claim(["q"])
    await store.settle([Reject(claim.receipt, "no such sku")])
    control = Control(store)
    assert (await control.why(id_)).reasons[0].remedy == f"millpond retry {id_}"
    (new,) = (await control.retry([id_])).published
    (reason,) = (await control.why(id_)).reasons
    assert "no such sku" in reason.text and "was retried" in reason.text
    assert reason.remedy == f"millpond why {new}"


async def test_nothing_is_in_its_way_with_a_worker_of_its_queue(store: Transport) -> None:
    id_ = await publish(store)
    control = Control(store)
    assert kinds(await control.why(id_)) == ["no-worker"]
    other = await store.workers.join("other", queues=["elsewhere"])
    assert kinds(await control.why(id_)) == ["no-worker"]
    await other.leave()
    worker = await store.workers.join("mill", queues=["q"])
    assert kinds(await control.why(id_)) == ["ready"]
    await worker.leave()
    unknown = await store.workers.join("old", queues=None)
    assert kinds(await control.why(id_)) == ["ready"], "it may consume the queue"
    await unknown.leave()


async def test_workers_of_other_shards_do_not_count(tmp_path: Path) -> None:
    store: Any = await millpond.connect(templates.shards(tmp_path))
    control = Control(store)
    ids = {}
    for n in range(100):
        key = f"key-{n}"
        ids[store.members.map.place(key, b"")] = await publish(store, key=key)
    worker = await store.members["a"].store.workers.join("mill", queues=["q"])
    found = {name: kinds(await control.why(id_)) for name, id_ in ids.items()}
    assert found.keys() == {"a", "b", "c"}
    assert "no-worker" not in found["a"] and found["b"][0] == found["c"][0] == "no-worker"
    await worker.leave()
    await store.close()


async def test_a_worker_that_is_down(store: Transport, clock: ManualClock) -> None:
    waiting, held = await publish(store), await publish(store, priority=0)
    worker = await store.workers.join("mill", queues=["q"])
    control = Control(store)
    await store.claim(["q"], 1, by_worker=True)
    assert kinds(await control.why(held)) == ["running"]
    clock.advance(60)
    why = await control.why(held)
    assert kinds(why) == ["worker-down"] and "60 s ago" in why.reasons[0].text
    why = await control.why(waiting)
    assert kinds(why)[0] == "no-worker" and "is alive" in why.reasons[0].text
    await worker.leave()


async def test_a_claim_without_a_worker(store: Transport) -> None:
    id_ = await publish(store)
    await store.claim(["q"], lease=600)
    assert kinds(await Control(store).why(id_)) == ["client"]


async def test_not_due_and_expired_and_paused_in_the_stated_order(store: Transport, clock: ManualClock) -> None:
    later = await publish(store, delay=3600, expires=60)
    worker = await store.workers.join("mill", queues=["q"])
    control = Control(store)
    why = await control.why(later)
    assert kinds(why) == ["not-due"] and "in 60 min" in why.reasons[0].text
    await store.operations.pause("q")
    clock.advance(120)
    await worker.beat()
    assert kinds(await control.why(later)) == ["paused", "expired", "not-due"]
    await worker.leave()
    assert kinds(await control.why(later)) == ["paused", "no-worker", "expired", "not-due"]
    assert [ORDER.index(kind) for kind in kinds(await control.why(later))] == sorted(
        ORDER.index(kind) for kind in kinds(await control.why(later))
    )


async def test_a_retry_names_its_error(store: Transport) -> None:
    id_ = await publish(store)
    (claim,) = await store.claim(["q"])
    await store.settle([Nack(claim.receipt, 60, "ValueError: no")])
    why = await Control(store).why(id_)
    assert "not-due" in kinds(why) and "ValueError: no" in why.reasons[-1].text


async def test_behind_others_is_counted_and_capped(store: Transport, clock: ManualClock) -> None:
    await publish(store, priority=1)
    await publish(store)
    clock.advance(1)
    id_ = await publish(store)
    await publish(store, priority=99)
    await publish(store, delay=60)
    await publish(store, queue="other", priority=0)
    worker = await store.workers.join("mill", queues=["q"])
    control = Control(store)
    why = await control.why(id_)
    assert kinds(why) == ["behind"] and why.reasons[0].text.startswith("2 due")
    await store.publish([Message(queue="q", payload=b"1", priority=0) for _ in range(1500)])
    assert (await control.why(id_)).reasons[0].text.startswith("1000 or more")
    await worker.leave()


async def test_a_suspect(store: Transport) -> None:
    id_ = await publish(store)
    for _ in range(2):
        (claim,) = await store.claim(["q"])
        await store.settle([GiveBack(claim.receipt, crashed=True, delay=0)])
    why = await Control(store).why(id_)
    assert "suspect" in kinds(why) and "2 times" in next(r.text for r in why.reasons if r.kind == "suspect")


async def test_held_by_a_stream(store: Transport) -> None:
    id_ = await publish(store)
    epoch, seq = await store.streams.open("nightly")
    await store.streams.claim("nightly", epoch, seq + 1, ["q"], 10)
    why = await Control(store).why(id_)
    assert kinds(why) == ["stream"] and "nightly" in why.reasons[0].text


@pytest.mark.parametrize("kind", ["postgres", "mariadb"])
@pytest.mark.server
async def test_locked_by_a_transaction(kind: str, shared_postgres: Any, shared_mariadb: Any) -> None:
    shared = shared_postgres if kind == "postgres" else shared_mariadb
    shared.empty()
    store = await millpond.connect(shared.url)
    id_ = await publish(store)
    async with held_transaction(shared.url):
        assert kinds(await Control(store).why(id_)) == ["no-worker", "locked"]
    assert kinds(await Control(store).why(id_)) == ["no-worker"]
    await store.close()
