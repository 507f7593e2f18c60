"""Publish, claim and settle over HTTP."""

from __future__ import annotations

import asyncio
import base64
import json
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from typing import Any
from uuid import uuid4

import pytest

from millpond import Claim, GiveBack, Message, Retry, State
from millpond.errors import StoreUnavailable
from millpond.server import claim_lines as claim_lines_module
from millpond.server.claim_lines import ClaimLines, WaitingCaller
from millpond.server.handlers import messages as messages_module
from tests.server.conftest import Client, Serve
from tests.triggers import execute, failing, id_literal
from tests.waiting import until


async def test_a_message_is_published_claimed_and_acked(client: Client) -> None:
    id_ = str(uuid4())
    message = {"body": {"sku": 7}, "id": id_, "key": "k", "priority": 3, "headers": {"trace": "x"}}
    assert await client.post("/queues/orders/messages", message) == {"id": id_, "new": True}
    assert await client.post("/queues/orders/messages", message) == {"id": id_, "new": False}
    (claim,) = (await client.post("/claims", {"queues": ["orders"], "lease": 10}))["claims"]
    assert (claim["id"], claim["body"], claim["key"], claim["priority"]) == (id_, {"sku": 7}, "k", 3)
    assert (claim["headers"], claim["deliveries"], claim["attempts"]) == ({"trace": "x"}, 1, 0)
    assert await client.post("/claims/extend", {"receipts": [claim["receipt"]], "lease": 60}) == {"refused": []}
    assert await client.post("/claims/ack", {"receipts": [claim["receipt"]]}) == {"refused": []}
    assert (await client.get(f"/messages/{id_}"))["state"] == "COMPLETED"
    assert await client.post("/claims/nack", {"receipts": [claim["receipt"]]}) == {"refused": [claim["receipt"]]}


@pytest.mark.parametrize(
    "body", [None, 0, -1.5, "text", "", [], {}, [1, {"a": None}], "🦆", 12345678901234567890123, 1e300, True]
)
async def test_every_json_body_comes_back_as_it_was(client: Client, body: object) -> None:
    await client.post("/queues/q/messages", {"body": body})
    (claim,) = (await client.post("/claims", {"queues": ["q"]}))["claims"]
    assert claim["body"] == body and type(claim["body"]) is type(body)


async def test_bytes_travel_as_base64(client: Client) -> None:
    data = base64.b64encode(bytes(range(256))).decode()
    await client.post("/queues/q/messages", {"base64": data})
    (claim,) = (await client.post("/claims", {"queues": ["q"]}))["claims"]
    assert claim["base64"] == data and "body" not in claim
    for wrong in (
        {},
        {"body": 1, "base64": ""},
        {"base64": "?"},
        {"body": 1, "unknown": 2},
        {"body": 1, "priority": 101},
    ):
        await client.post("/queues/q/messages", wrong, expect=400)


def _text(value: object) -> str:
    return base64.urlsafe_b64encode(json.dumps(value).encode()).decode().rstrip("=")


@pytest.mark.parametrize("number", [10**30, -(10**400), 2**63])
async def test_numbers_out_of_range_are_refused(client: Client, number: int) -> None:
    id_ = str(uuid4())
    for receipt in ([id_, number, "q", 0], [id_, 1, "q", number], [id_, 1, "q", -1]):
        for verb in ("ack", "nack", "extend"):
            await client.post(f"/claims/{verb}", {"receipts": [_text(receipt)]}, expect=400)
    for cursor in ([False, ["q", False, 50, number, id_]], [True, [number, id_]]):
        await client.get("/messages", params={"cursor": _text(cursor)}, expect=400)
    await client.get("/messages", params={"failure": str(number)}, expect=400)


async def test_many_are_published_all_or_none(client: Client) -> None:
    bodies = [{"body": n} for n in range(5)]
    published = (await client.post("/queues/q/messages/batch", {"messages": bodies}))["published"]
    assert len({p["id"] for p in published}) == 5
    await client.post(
        "/queues/q/messages/batch",
        {"messages": [*bodies, {"body": 1, "delay": 1, "due_at": "2030-01-01T00:00:00Z"}]},
        expect=400,
    )
    claims = (await client.post("/claims", {"queues": ["q"], "limit": 100}))["claims"]
    assert [claim["body"] for claim in claims] == [0, 1, 2, 3, 4]


async def test_a_claim_waits_for_a_message(client: Client) -> None:
    waiting = asyncio.create_task(client.post("/claims", {"queues": ["q", "r"], "wait": 50}))
    await until(lambda: client.state.waiting.taken)
    await client.post("/queues/r/messages", {"body": "late"})
    (claim,) = (await waiting)["claims"]
    assert claim["body"] == "late" and client.state.waiting.taken == 0
    assert await client.post("/claims", {"queues": ["q"], "wait": 0.05}) == {"claims": []}


async def test_waiting_callers_get_messages_in_turn(client: Client) -> None:
    shares: Counter[int] = Counter()

    async def consume(number: int) -> None:
        while True:
            asked = {"queues": ["q", "other"], "wait": 60}
            for claim in (await client.post("/claims", asked))["claims"]:
                shares[number] += 1
                await client.post("/claims/ack", {"receipts": [claim["receipt"]]})

    tasks = [asyncio.create_task(consume(number)) for number in range(5)]
    for total in range(1, 26):
        await until(lambda: client.state.waiting.taken == 5)
        await client.post("/queues/q/messages", {"body": 1})
        await until(lambda total=total: sum(shares.values()) == total)  # type: ignore[misc]
    assert set(shares.values()) == {5}, "the one that waits longest is served first"
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def test_a_claim_that_does_not_end_gives_back_before_the_server_is_closed(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(claim_lines_module, "_CLOSE_WITHIN", 0.1)
    began, gave_back = asyncio.Event(), asyncio.Event()

    async def claim(queues: Sequence[str]) -> list[Claim]:
        claims = await client.store.claim(queues)
        began.set()
        try:
            await asyncio.Event().wait()
        finally:
            await client.store.settle([GiveBack(claim.receipt) for claim in claims])
            gave_back.set()
        return claims

    await client.store.publish([Message(queue="q", payload=b"1")])
    lines = ClaimLines(client.store)
    lines.join(WaitingCaller(["q"], claim, limit=1, lease=30))
    await began.wait()
    await lines.close()
    assert gave_back.is_set()
    assert len(await client.store.claim(["q"])) == 1


async def test_waiting_callers_share_what_is_there(client: Client) -> None:
    waiting = []
    for number, (limit, lease) in enumerate([(10, 30), (1, 30), (10, 30), (10, 60), (10, 30)], 1):
        asked = {"queues": ["q"], "limit": limit, "lease": lease, "wait": 60}
        waiting.append(asyncio.create_task(client.post("/claims", asked)))
        await until(lambda number=number: client.state.waiting.taken == number)  # type: ignore[misc]
    await client.store.publish([Message(queue="q", payload=b"%d" % n) for n in range(8)])
    shares = [waiting[n] for n in (0, 1, 2, 4)]
    claims = [[claim["body"] for claim in (await one)["claims"]] for one in shares]
    assert claims == [[0, 4, 7], [1], [2, 5], [3, 6]]
    assert not waiting[3].done(), "its lease is another one"
    await client.post("/queues/q/messages", {"body": 8})
    assert [claim["body"] for claim in (await waiting[3])["claims"]] == [8]
    assert client.state.waiting.taken == 0


async def test_an_error_of_the_database_reaches_a_waiting_caller(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    waiting = asyncio.create_task(client.post("/claims", {"queues": ["q"], "wait": 60}, expect=503))
    await until(lambda: client.state.waiting.taken)

    async def fail(*args: Any, **options: Any) -> Any:
        raise StoreUnavailable("cut")

    with monkeypatch.context() as patched:
        patched.setattr(client.store, "claim", fail)
        await waiting
    later = asyncio.create_task(client.post("/claims", {"queues": ["q"], "wait": 60}))
    await until(lambda: client.state.waiting.taken)
    await client.post("/queues/q/messages", {"body": 1})
    assert len((await later)["claims"]) == 1


async def test_a_stopping_server_ends_waiting_claims(client: Client) -> None:
    waiting = asyncio.create_task(client.post("/claims", {"queues": ["q"], "wait": 60}))
    await until(lambda: client.state.waiting.taken)
    client.state.stopping.set()
    assert await waiting == {"claims": []}
    assert (await client.call("GET", "/ready", expect=503))["obstacle"] == "the server stops"


async def test_a_claim_under_way_when_the_server_stops_is_given_back(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    claim = client.store.claim
    claimed, answered = asyncio.Event(), asyncio.Event()

    async def slow(*args: Any, **options: Any) -> Any:
        if claims := await claim(*args, **options):
            claimed.set()
            await answered.wait()
        return claims

    monkeypatch.setattr(client.store, "claim", slow)
    waiting = asyncio.create_task(client.post("/claims", {"queues": ["q"], "wait": 60}))
    await until(lambda: client.state.waiting.taken)
    await client.store.publish([Message(queue="q", payload=b"1")])
    await claimed.wait()
    client.state.stopping.set()
    assert await waiting == {"claims": []}
    closing = asyncio.create_task(client.state.close())
    await asyncio.sleep(0)
    answered.set()
    await closing
    (row,) = await client.store.operations.browse("q")
    assert (row.state, row.deliveries) == (State.PENDING, 0)


async def test_a_claim_that_fails_in_its_middle_answers_what_it_has(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    await client.store.publish([Message(queue="q", payload=b"1") for _ in range(3)])
    claim = client.store.claim
    calls = Counter[str]()

    async def fail_later(*args: Any, **options: Any) -> Any:
        calls["claim"] += 1
        if calls["claim"] > 1:
            raise StoreUnavailable("cut")
        return await claim(*args, **options)

    with monkeypatch.context() as patched:
        patched.setattr(client.store, "claim", fail_later)
        patched.setattr(messages_module, "_FIRST", 2)
        assert len((await client.post("/claims", {"queues": ["q"], "limit": 3}))["claims"]) == 2
    assert calls["claim"] == 2


async def test_nack_obeys_the_policy_of_its_queue(client: Client) -> None:
    await client.store.operations.configure("q", retry=Retry(attempts=2, initial=0))
    id_ = (await client.post("/queues/q/messages", {"body": 1}))["id"]
    for attempt in range(2):
        (claim,) = (await client.post("/claims", {"queues": ["q"]}))["claims"]
        nack = {"receipts": [claim["receipt"]], "error": f"E{attempt}", "traceback": "where"}
        assert await client.post("/claims/nack", nack) == {"refused": []}
    row = await client.get(f"/messages/{id_}")
    assert (row["state"], row["reason"], row["error"]) == ("FAILED", "retries used up", "E1")
    assert [failed["error"] for failed in row["failed_attempts"]] == ["E0", "E1"]


async def test_nack_waits_by_the_retry_settings_and_ends_in_failed(client: Client) -> None:
    id_ = (await client.post("/queues/q/messages", {"body": 1}))["id"]
    for attempt in range(8):
        await client.store.operations.reschedule([id_], delay=0)
        (claim,) = (await client.post("/claims", {"queues": ["q"]}))["claims"]
        assert claim["attempts"] == attempt
        nack = {"receipts": [claim["receipt"]], "error": f"E{attempt}", "traceback": "where"}
        assert await client.post("/claims/nack", nack) == {"refused": []}
    row = await client.get(f"/messages/{id_}")
    assert (row["state"], row["reason"], row["error"]) == ("FAILED", "retries used up", "E7")
    assert [attempt["error"] for attempt in row["failed_attempts"]] == [f"E{n}" for n in range(8)]


async def test_reject_give_back_and_a_delay(client: Client) -> None:
    ids = [(await client.post("/queues/q/messages", {"body": n}))["id"] for n in range(3)]
    one, two, three = (await client.post("/claims", {"queues": ["q"], "limit": 3}))["claims"]
    await client.post("/claims/reject", {"receipts": [one["receipt"]], "reason": "no such sku"})
    await client.post("/claims/give-back", {"receipts": [two["receipt"]]})
    await client.post("/claims/nack", {"receipts": [three["receipt"]], "delay": 3600})
    rows = [await client.get(f"/messages/{id_}") for id_ in ids]
    assert [row["state"] for row in rows] == ["FAILED", "PENDING", "RETRYABLE"]
    assert rows[0]["reason"] == "no such sku" and rows[1]["deliveries"] == 0
    assert rows[2]["due_at"] > rows[2]["created_at"]


async def test_a_lapsed_claim_of_a_client_is_no_crash(client: Client) -> None:
    id_ = (await client.post("/queues/q/messages", {"body": 1}))["id"]
    await client.post("/claims", {"queues": ["q"], "lease": 1})
    await until(client.store.workers.reap)
    row = await client.get(f"/messages/{id_}")
    assert (row["state"], row.get("crashes", 0)) == (State.PENDING.value, 0)


@pytest.mark.parametrize("text", ["", "x", "W10", "🦆", "A" * 5000, "WzEsMiwzXQ", "bnVsbA"])
async def test_a_foreign_receipt_is_refused(client: Client, text: str) -> None:
    assert "receipt" in (await client.post("/claims/ack", {"receipts": [text]}, expect=400))["message"]


async def test_a_message_that_cannot_be_settled_holds_up_no_other_one(serve: Serve, sqlite_url: str) -> None:
    client = await serve(sqlite_url)
    for n in range(3):
        await client.post("/queues/q/messages", {"body": n})
    claims = (await client.post("/claims", {"queues": ["q"], "limit": 3}))["claims"]
    with failing(sqlite_url, "DELETE", "millpond_message", "ROW.payload = x'31'"):
        problem = await client.post("/claims/ack", {"receipts": [claim["receipt"] for claim in claims]}, expect=400)
    assert problem["error"] == "DataRefused"
    assert f"refused to settle {claims[1]['id']}; the others were settled" in problem["message"]
    states = [(await client.get(f"/messages/{claim['id']}"))["state"] for claim in claims]
    assert states == ["COMPLETED", "PROCESSING", "COMPLETED"]


async def test_a_receipt_of_a_queue_out_of_reach_is_refused(serve: Serve) -> None:
    client = await serve()
    await client.post("/queues/a/messages", {"body": 1})
    (claim,) = (await client.post("/claims", {"queues": ["a"]}))["claims"]
    only_b = await client.token("consume", queues=("b",))
    await client.post("/claims/ack", {"receipts": [claim["receipt"]]}, expect=403, headers=only_b)
    await client.post("/claims", {"queues": ["b", "a"]}, expect=403, headers=only_b)
    assert await client.post("/claims", {"queues": ["b"]}, headers=only_b) == {"claims": []}


async def test_a_time_out_of_range_hides_no_neighbour(sqlite_url: str, serve: Serve) -> None:
    """A row that is there all the same, as on a server that checks no constraints."""
    client = await serve(sqlite_url)
    published = await client.store.publish([Message(queue="q", payload=b"%d" % n) for n in range(3)])
    for column, value in {"created_at": "1760000000000000000", "due_at": "-4000000000000000000"}.items():
        execute(
            sqlite_url,
            "PRAGMA ignore_check_constraints = 1",
            f"UPDATE millpond_message SET {column} = {value} WHERE id = {id_literal(sqlite_url, published[1].id)}",
        )
    rows = (await client.get("/messages", params={"queue": "q"}))["messages"]
    assert [row["created_at"][:5] for row in rows if row["id"] == str(published[1].id)] == ["9999-"]
    claims = (await client.post("/claims", {"queues": ["q"], "limit": 3}))["claims"]
    assert {claim["id"] for claim in claims} == {str(one.id) for one in published}
    command = [sys.executable, "-m", "millpond", "list", "q", "--url", sqlite_url]
    listed = await asyncio.to_thread(subprocess.run, command, capture_output=True, text=True, check=False)
    assert listed.returncode == 0, listed.stderr
    assert all(str(one.id) in listed.stdout for one in published)
