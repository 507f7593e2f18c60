"""Search and retry by choice, over real stores."""

from __future__ import annotations

from collections.abc import AsyncIterator
from datetime import timedelta
from typing import Any

import pytest

import millpond
from millpond import Ack, ManualClock, Message, Nack, Reject, State, Transport
from millpond.clock import as_datetime
from millpond.control import Choice, Control, bounded_reads
from millpond.control import search as search_module
from millpond.errors import InvalidOption
from tests.shared import KINDS, empty_database


@pytest.fixture(params=KINDS)
def url(request: pytest.FixtureRequest) -> str:
    return empty_database(request, request.param)


@pytest.fixture
async def store(url: str) -> AsyncIterator[Transport]:
    store = await millpond.connect(url, migrate=True, clock=ManualClock())
    yield store
    await store.close()


async def failed(store: Transport, queue: str, errors: list[str]) -> None:
    await store.publish([Message(queue=queue, payload=f"body {n}".encode()) for n in range(len(errors))])
    claims = await store.claim([queue], len(errors))
    await store.settle([Reject(claim.receipt, "error", error) for claim, error in zip(claims, errors, strict=True)])


async def every(control: Control, choice: Choice, limit: int) -> list[str]:
    """All pages, each followed by its cursor."""
    found: list[str] = []
    cursor = None
    while True:
        page = await control.search(choice, limit=limit, cursor=cursor)
        assert len(page.rows) <= limit
        found += [str(row.id) for row in page.rows]
        cursor = page.cursor
        if cursor is None:
            return found


async def test_pages_cover_live_and_archived_messages_once(store: Transport) -> None:
    await failed(store, "q", [f"error {n}" for n in range(7)])
    await store.publish([Message(queue="q", payload=b"live") for _ in range(5)])
    await store.publish([Message(queue="other", payload=b"live")])
    control = Control(store)
    for limit in (1, 3, 100):
        ids = await every(control, Choice(queue="q"), limit)
        assert len(ids) == len(set(ids)) == 12
    assert len(await every(control, Choice(), 4)) == 13
    assert len(await every(control, Choice(states=[State.FAILED]), 4)) == 7


async def test_texts_are_compared_within_bounds(store: Transport, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(search_module, "MOST_READ", 4)
    monkeypatch.setattr(bounded_reads, "AT_ONCE", 2)
    await failed(store, "q", ["needle", *["hay"] * 9, "NEEDLE too"])
    control = Control(store)
    first = await control.search(Choice(queue="q", error="needle", states=[State.FAILED]), limit=5)
    assert first.read == 4 and first.cursor is not None
    assert len(await every(control, Choice(queue="q", error="needle"), 5)) == 2
    assert len(await every(control, Choice(queue="q", error="needle"), 1)) == 2
    assert len(await every(control, Choice(text="body 1"), 5)) == 2
    assert len(await every(control, Choice(reason="error", text="body 3"), 5)) == 1


async def test_keys_are_compared_within_bounds(store: Transport, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(search_module, "MOST_READ", 4)
    monkeypatch.setattr(bounded_reads, "AT_ONCE", 2)
    await failed(store, "q", ["error"] * 6)
    await store.publish([Message(queue="q", payload=b"1", key="k" if n == 5 else None) for n in range(6)])
    control = Control(store)
    page = await control.search(Choice(queue="q", key="k"), limit=5)
    assert (page.rows, page.read) == ([], 4) and page.cursor is not None
    assert len(await every(control, Choice(queue="q", key="k"), 5)) == 1


async def test_a_small_page_by_time_reads_many_rows_at_once(store: Transport, monkeypatch: pytest.MonkeyPatch) -> None:
    await store.publish([Message(queue="q", payload=b"1") for _ in range(40)])
    reads, browse = [], store.operations.browse

    async def counted(*args: Any, **options: Any) -> Any:
        reads.append(options["limit"])
        return await browse(*args, **options)

    monkeypatch.setattr(store.operations, "browse", counted)
    (row,) = await browse("q", limit=1)
    later = row.created_at + timedelta(days=1)
    assert (await Control(store).search(Choice(queue="q", since=later, states=[State.PENDING]), limit=1)).rows == []
    assert reads == [50]


async def test_operators_verbs_read_few_large_bodies_at_once(store: Transport, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bounded_reads, "FIRST", 2)
    monkeypatch.setattr(bounded_reads, "BYTES_AT_ONCE", 3000)
    largest = 0

    def watched(name: str) -> None:
        call = getattr(store.operations, name)

        async def read(*args: Any, **options: Any) -> Any:
            nonlocal largest
            rows = await call(*args, **options)
            largest = max(largest, sum(len(row.payload) for row in rows))
            return rows

        monkeypatch.setattr(store.operations, name, read)

    for name in ("browse", "archived", "find"):
        watched(name)
    worker = await store.workers.join("mill", queues=["q"])
    await store.publish([Message(queue="q", payload=b"x" * 1000) for _ in range(20)])
    control = Control(store)
    await control.doctor()
    claims = await store.claim(["q"], 20, by_worker=True)
    assert len(await control.worker_messages(worker.id)) == 20
    assert len(await control.worker_messages(worker.id, limit=5)) == 5
    await store.settle([Reject(claim.receipt, "error", "E") for claim in claims])
    ids = [claim.receipt.id for claim in claims]
    assert len((await control.retry(ids[:7])).published) == 7
    assert len((await control.retry_matching(Choice(queue="q"), limit=7)).published) == 7
    assert len((await control.retry_queue("q")).published) == 6
    assert len(await control.replay_queue("q", name="again", states=[State.FAILED])) == 20
    await worker.leave()
    assert 0 < largest <= 3000


async def test_a_choice_by_time_and_key(store: Transport) -> None:
    await store.publish([Message(queue="q", payload=b"1", key="k"), Message(queue="q", payload=b"2")])
    control = Control(store)
    assert len(await every(control, Choice(key="k"), 9)) == 1
    (row, _) = (await control.search(Choice(queue="q"))).rows
    created = as_datetime(row.created_us)
    assert await every(control, Choice(since=created + timedelta(seconds=1)), 9) == []
    assert len(await every(control, Choice(until=created + timedelta(seconds=1)), 9)) == 2


LONG = f"a.b.{'9' * 5000}=7"
"""Python refuses to read this number."""


async def test_a_value_within_the_body_is_compared(store: Transport) -> None:
    for body in (b'{"a": {"b": [7, "x"]}}', b'{"a": {"b": [8]}}', b"7", b"\xff", b'{"a": "7"}', b'{"a": true}', b"["):
        await store.publish([Message(queue="q", payload=body)])
    control = Control(store)
    found = {
        path: [row.payload for row in (await control.search(Choice(path=path), limit=9)).rows]
        for path in ("a.b.0=7", "a.b.1=x", 'a.b.1="x"', "a.b.9=7", "a=7", "a=true", "a=1", LONG, "a=\udcff")
    }
    first = [b'{"a": {"b": [7, "x"]}}']
    assert found["a.b.0=7"] == found["a.b.1=x"] == found['a.b.1="x"'] == first
    assert found["a=7"] == [b'{"a": "7"}'] and found["a=true"] == [b'{"a": true}']
    assert found["a.b.9=7"] == found["a=1"] == found[LONG] == found["a=\udcff"] == []
    for wrong in ("a", "=7", "a..b=7", ""):
        with pytest.raises(InvalidOption, match="path"):
            Choice(path=wrong)


@pytest.mark.parametrize("cursor", ["", "x", "W10", "!!", "WzEsMl0", "é"])
async def test_a_foreign_cursor_is_refused(cursor: str) -> None:
    store = await millpond.connect("memory://")
    try:
        with pytest.raises(InvalidOption, match="cursor"):
            await Control(store).search(Choice(), cursor=cursor)
    finally:
        await store.close()


async def test_retry_of_all_that_match_with_preview_and_limit(store: Transport) -> None:
    await failed(store, "q", ["KeyError: 'a'", "KeyError: 'b'", "TypeError"])
    control = Control(store)
    (group,) = [group for group in await store.operations.failures() if group.messages == 2]
    choice = Choice(queue="q", failure=group.fingerprint)
    preview = await control.preview_retry(choice)
    assert (preview.messages, preview.complete) == (2, True)
    assert len((await control.retry_matching(choice, limit=1)).published) == 1
    assert (await control.preview_retry(choice)).messages == 1
    assert len((await control.retry_matching(choice, rate=1000)).published) == 1
    assert (await control.preview_retry(choice)).messages == 0
    with pytest.raises(InvalidOption, match="rate"):
        await control.retry_matching(choice, rate=0)


async def test_overview_and_one_message(store: Transport) -> None:
    await store.publish([Message(queue="q", payload=b"{}") for _ in range(2)])
    first, _ = await store.claim(["q"], 2)
    await store.settle([Nack(first.receipt, 0, "no")])
    (again,) = await store.claim(["q"], 1)
    await store.settle([Ack(again.receipt)])
    control = Control(store)
    (view,) = await control.overview()
    assert view.stats.queue == "q" and view.completed_per_second == pytest.approx(1 / 60)
    assert view.failed_per_second == 0
    row = await control.message(first.receipt.id)
    assert row is not None and [attempt.error for attempt in row.failed_attempts] == ["no"]
    assert await control.message(millpond.id_from("unknown")) is None
