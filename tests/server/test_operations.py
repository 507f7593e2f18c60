"""Operators' verbs over HTTP, with masks and recorded actions."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from urllib.parse import quote

import pytest

from millpond import Message
from millpond.control import bounded_reads
from millpond.control import search as search_module
from millpond.errors import StoreUnavailable
from millpond.server import state as state_module
from millpond.server.dashboard import serving as serving_module
from millpond.server.grants import Role
from millpond.server.handlers import messages as messages_module
from millpond.server.settings import Limits, parse_masks
from tests.server.conftest import Client, Serve
from tests.shared import KINDS, empty_database
from tests.waiting import until

HOSTILE = [
    "<script>alert(1)</script>",
    "a/b",
    "a?b#c",
    "%00",
    "'; DROP TABLE x; --",
    "🦆",
    "..",
    "x" * 255,
    "\u202egnp",
]


@pytest.fixture(params=KINDS)
def url(request: pytest.FixtureRequest) -> str:
    return empty_database(request, request.param)


async def failed(client: Client, queue: str, errors: list[str]) -> list[str]:
    ids = [(await client.post(f"/queues/{queue}/messages", {"body": {"n": n}}))["id"] for n in range(len(errors))]
    claims = (await client.post("/claims", {"queues": [queue], "limit": len(errors)}))["claims"]
    for claim, error in zip(claims, errors, strict=True):
        await client.post("/claims/reject", {"receipts": [claim["receipt"]], "reason": "error", "error": error})
    return ids


async def test_a_failed_message_is_found_understood_and_retried(serve: Serve, url: str) -> None:
    client = await serve(url)
    ids = await failed(client, "orders", ["KeyError: 'a'", "KeyError: 'b'", "TypeError: no"])
    (queue,) = (await client.get("/queues"))["queues"]
    assert queue["queue"] == "orders" and queue["counts"]["FAILED"] == 3 and queue["failed_per_second"] > 0
    groups = (await client.get("/failures"))["failures"]
    alike = next(group for group in groups if group["messages"] == 2)
    page = await client.get("/messages", params={"queue": "orders", "failure": alike["fingerprint"], "limit": 1})
    rest = await client.get("/messages", params={"failure": alike["fingerprint"], "cursor": page["cursor"]})
    found = {row["id"] for row in [*page["messages"], *rest["messages"]]}
    assert len(found) == 2 and found < set(ids)
    assert (await client.get("/messages", params={"error": "typeerror"}))["messages"][0]["error"] == "TypeError: no"
    preview = await client.post("/queues/orders/retry", {"failure": alike["fingerprint"], "preview": True})
    assert preview == {"matching": 2}
    retried = await client.post("/queues/orders/retry", {"failure": alike["fingerprint"]})
    assert len(retried["published"]) == 2
    assert [group["messages"] for group in (await client.get("/failures"))["failures"]] == [1]
    started = await client.post("/queues/orders/retry", {"rate": 1000})
    assert started["in_background"] and started["matching"] >= 1

    async def none_left() -> bool:
        return not (await client.get("/failures"))["failures"]

    await until(none_left)
    actions = (await client.get("/actions"))["actions"]
    assert [action["action"] for action in actions] == ["retry_queue"] * 3
    assert len(actions[1]["detail"]["published"]) == 2 and actions[0]["actor"] == "local"


async def test_changes_of_messages_and_queues(serve: Serve, url: str) -> None:
    client = await serve(url)
    ids = [(await client.post("/queues/q/messages", {"body": n}))["id"] for n in range(3)]
    await client.post("/queues/q/pause")
    assert await client.post("/claims", {"queues": ["q"]}) == {"claims": []}
    assert (await client.get("/queues/q"))["paused"] is True
    await client.post("/queues/q/resume")
    assert await client.post("/messages/reschedule", {"ids": ids[:1], "priority": 7}) == {"ids": ids[:1]}
    assert await client.post("/messages/cancel", {"ids": ids[1:2], "reason": "no more"}) == {"ids": ids[1:2]}
    assert (await client.get(f"/messages/{ids[0]}"))["priority"] == 7
    assert (await client.get(f"/messages/{ids[1]}"))["reason"] == "no more"
    await client.post("/messages/reschedule", {"ids": ids[:1]}, expect=400)
    assert await client.post("/queues/q/replay", {"name": "again", "to": "r"}) != {"published": []}
    assert await client.post("/queues/q/replay", {"name": "again", "to": "r"}) == {"published": []}
    assert await client.post("/queues/q/purge", {"until": "2020-01-31T08:00:00Z"}) == {"purged": 0}
    await client.post("/queues/q/purge", {"until": "2020-01-31T08:00:00"}, expect=400)
    await client.post("/queues/q/purge", {"until": "2020-01-31T08:00:00Z", "older_than": 0}, expect=400)
    assert await client.post("/queues/q/purge", {"older_than": 0}) == {"purged": 1}
    await client.get(f"/messages/{ids[1]}", expect=404)
    await client.get("/queues/unknown", expect=404)
    await client.get("/messages/no-uuid", expect=400)
    if not url.startswith("memory"):
        assert await client.get("/streams") == {"streams": []}
        await client.post("/streams/none/release", expect=404)


async def test_why_and_doctor(serve: Serve, url: str) -> None:
    client = await serve(url)
    id_ = (await client.post("/queues/q/messages", {"body": 1}))["id"]
    await client.post("/queues/q/pause")
    why = await client.get(f"/messages/{id_}/why")
    assert [reason["kind"] for reason in why["reasons"]] == ["paused", "no-worker"]
    other = await client.token(Role.READ, queues=("other",))
    await client.get(f"/messages/{id_}/why", headers=other, expect=403)
    await client.get("/doctor", headers=other, expect=403)
    everything = await client.token(Role.READ)
    assert isinstance((await client.get("/doctor", headers=everything))["findings"], list)


async def test_workers_and_their_messages(serve: Serve, url: str) -> None:
    client = await serve(url)
    presence = await client.store.workers.join("mill", queues=["q"])
    await client.post("/queues/q/messages", {"body": 1})
    await client.store.claim(["q"], 1, by_worker=True)
    (worker,) = (await client.get("/workers"))["workers"]
    assert (worker["name"], worker["queues"], worker["held"], worker["beats"]) == ("mill", ["q"], 1, True)
    (held,) = (await client.get(f"/workers/{worker['id']}/messages"))["messages"]
    assert held["queue"] == "q"
    await client.get("/workers/-1/messages", expect=404)
    assert (await client.get(f"/workers/{'9' * 19}/messages"))["messages"] == []
    await presence.leave()


async def test_bodies_are_masked_by_role_and_queue(serve: Serve) -> None:
    client = await serve(mask=parse_masks(["read:pay.*", "operate:pay.cards"]))
    ids = {
        queue: (await client.post(f"/queues/{queue}/messages", {"body": "4111", "headers": {"h": 1}}))["id"]
        for queue in ("pay.cards", "pay.other", "open")
    }
    for role, seen in {Role.READ: {"open"}, Role.OPERATE: {"open", "pay.other"}}.items():
        headers = await client.token(role, name=role.value)
        for queue, id_ in ids.items():
            row = await client.get(f"/messages/{id_}", headers=headers)
            listed = (await client.get(f"/messages?queue={queue}", headers=headers))["messages"][0]
            for shown in (row, listed):
                assert ("body" in shown) is (queue in seen) is ("headers" in shown), (role, queue)
                assert shown.get("masked", False) is (queue not in seen)
        await client.get("/messages?queue=pay.cards&text=4111", headers=headers, expect=403)
        await client.get("/messages?text=4111", headers=headers, expect=403)
        await client.get("/messages?queue=open&text=4111", headers=headers)


async def test_errors_are_masked_like_bodies(serve: Serve) -> None:
    client = await serve(mask=parse_masks(["read:pay.*", "operate:pay.*"]))
    (id_,) = await failed(client, "pay.cards", ["ValueError: card 4111"])
    later = (await client.post("/queues/pay.cards/messages", {"body": 1}))["id"]
    (claim,) = (await client.post("/claims", {"queues": ["pay.cards"]}))["claims"]
    attempt = {"receipts": [claim["receipt"]], "delay": 600, "error": "E: 4111", "traceback": "at 4111"}
    await client.post("/claims/nack", attempt)
    await client.post("/queues/open/messages", {"body": 1})
    headers = await client.token(Role.OPERATE)
    pages = ("/messages", "/failures", *(f"/messages/{one}{part}" for one in (id_, later) for part in ("", "/why")))
    for page in pages:
        assert "4111" not in (await client.http.get(f"/api/v1{page}", headers=headers)).text, page
    for page in ("/dashboard/failures", f"/dashboard/messages/{later}", f"/dashboard/messages/{id_}"):
        reply = await client.http.get(page, headers=headers)
        assert reply.status_code == 200 and "4111" not in reply.text, page
    for query in ("queue=pay.cards&error=4111", "error=4111"):
        await client.get(f"/messages?{query}", headers=headers, expect=403)
    by_error = {"error": "4111", "preview": True}
    await client.post("/queues/pay.cards/retry", by_error, headers=headers, expect=403)


async def test_a_replay_does_not_lift_a_mask(serve: Serve) -> None:
    client = await serve(mask=parse_masks(["read:pay.*", "operate:pay.*"]))
    await failed(client, "pay.cards", ["E"])
    headers = await client.token(Role.OPERATE)
    await client.post("/queues/pay.cards/replay", {"name": "r", "to": "open"}, headers=headers, expect=403)
    for to in ("pay.other", None):
        asked = {"name": f"to {to}", "to": to}
        assert len((await client.post("/queues/pay.cards/replay", asked, headers=headers))["published"]) == 1


@pytest.mark.parametrize("name", HOSTILE)
async def test_hostile_names_are_data(client: Client, name: str) -> None:
    from urllib.parse import quote

    path = f"/queues/{quote(name, safe='')}"
    published = await client.http.post(
        f"/api/v1{path}/messages", json={"body": name, "key": name, "headers": {name: name}}
    )
    if "/" in name or name == "..":  # a client may write such a path in several ways; none may be a server error
        assert published.status_code in (200, 400, 404, 405)
        return
    assert published.status_code == 200, published.text
    (claim,) = (await client.post("/claims", {"queues": [name]}))["claims"]
    assert (claim["queue"], claim["body"], claim["headers"][name]) == (name, name, name)
    await client.post("/claims/reject", {"receipts": [claim["receipt"]], "reason": name, "error": name})
    (row,) = (await client.get("/messages", params={"queue": name, "error": name}))["messages"]
    assert row["error"] == name
    reply = await client.http.get("/metrics")
    assert reply.status_code == 200


async def test_limits_of_bodies_rates_and_requests(serve: Serve) -> None:
    client = await serve(limits=Limits(body=2000, rate=5, batch=3, connections=1, waiting=0))
    big = {"body": "x" * 3000}
    assert "limit" in (await client.post("/queues/q/messages", big, expect=413))["message"]
    many = {"messages": [{"body": 1}] * 4}
    await client.post("/queues/q/messages/batch", many, expect=413)
    await client.post("/claims", {"queues": ["q"], "wait": 5}, expect=503)
    codes = [(await client.http.get("/api/v1/queues")).status_code for _ in range(10)]
    assert 429 in codes
    client.state.rates.forget()
    with client.state.connections.one():
        reply = await client.http.get("/api/v1/queues")
        assert reply.status_code == 503 and reply.headers["retry-after"] == "1"
        for path in ("/live", "/ready"):
            await client.call("GET", path)


async def test_one_token_leaves_places_to_others(serve: Serve) -> None:
    client = await serve(limits=Limits(connections=4, waiting=4))
    greedy, other = await client.token(Role.CONSUME, Role.READ), await client.token(Role.READ, name="other")
    waiting = [
        asyncio.create_task(client.post("/claims", {"queues": ["q"], "wait": 60}, headers=greedy)) for _ in range(3)
    ]
    await until(lambda: client.state.waiting.taken == 3)
    await client.get("/queues", headers=greedy, expect=429)
    await client.get("/queues", headers=other)
    client.state.stopping.set()
    await asyncio.gather(*waiting)


async def test_claims_and_pages_are_bounded_by_bytes(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    client = await serve(limits=Limits(reply=5000))
    await client.store.publish([Message(queue="q", payload=b'"%s"' % (b"x" * 998)) for _ in range(20)])
    monkeypatch.setattr(messages_module, "_FIRST", 1)
    assert len((await client.post("/claims", {"queues": ["q"], "limit": 10}))["claims"]) == 5
    monkeypatch.setattr(search_module, "BYTES_OF_PAGE", 4000)
    monkeypatch.setattr(bounded_reads, "BYTES_AT_ONCE", 2000)
    monkeypatch.setattr(bounded_reads, "FIRST", 2)
    page = await client.get("/messages", params={"queue": "q"})
    assert len(page["messages"]) == 4
    seen = len(page["messages"])
    while cursor := page.get("cursor"):
        page = await client.get("/messages", params={"queue": "q", "cursor": cursor})
        seen += len(page["messages"])
    assert seen == 20


async def test_a_slow_login_is_cut(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serving_module, "_LOGIN_WITHIN", 0.01)

    async def slow() -> AsyncIterator[bytes]:
        yield b"token="
        await asyncio.Event().wait()

    form = {"content-type": "application/x-www-form-urlencoded"}
    reply = await client.http.post("/dashboard/login", content=slow(), headers=form)
    assert reply.status_code == 408


@pytest.mark.parametrize("queue", ["a/b", "a/messages", "/", "a/b/retry"])
async def test_a_queue_with_slashes_is_reached(client: Client, queue: str) -> None:
    path = f"/queues/{quote(queue, safe='')}"
    await client.post(f"{path}/messages", {"body": 1})
    assert (await client.get(path))["queue"] == queue
    await client.post(f"{path}/pause")
    assert (await client.get(path))["paused"] is True
    assert (await client.post("/claims", {"queues": [queue]}))["claims"] == []
    await client.post(f"{path}/resume")
    (claim,) = (await client.post("/claims", {"queues": [queue]}))["claims"]
    assert claim["queue"] == queue


@pytest.mark.parametrize(
    "content",
    [b"", b"{", b"[]", b"null", b"\xff\xfe", b'{"body": ' + b"[" * 100_000, b'{"queues": "q"}', b'{"body": NaN}'],
)
async def test_broken_bodies_are_refused(client: Client, content: bytes) -> None:
    for path in ("queues/q/messages", "claims", "claims/ack", "messages/retry", "queues/q/purge"):
        if path.endswith("purge") and content == b"":
            continue  # all of its fields have defaults
        reply = await client.http.post(f"/api/v1/{path}", content=content, headers={"content-type": "application/json"})
        assert reply.status_code == 400, (path, reply.text)


async def test_messages_are_done_without_running(client: Client) -> None:
    one, two = [(await client.post("/queues/q/messages", {"body": n}))["id"] for n in range(2)]
    assert await client.post("/messages/done", {"ids": [one]}) == {"ids": [one]}
    assert (await client.get(f"/messages/{one}"))["state"] == "COMPLETED"
    (claim,) = (await client.post("/claims", {"queues": ["q"]}))["claims"]
    assert await client.post("/messages/done", {"ids": [two]}) == {"ids": []}
    assert await client.post("/messages/done", {"ids": [two], "force": True}) == {"ids": [two]}
    assert (await client.post("/claims/ack", {"receipts": [claim["receipt"]]}))["refused"] in ([], [claim["receipt"]])
    assert (await client.get("/shards")) == {"shards": []}


async def test_settings_of_queues(serve: Serve, url: str) -> None:
    client = await serve(url)
    changed = await client.post("/queues/q/settings", {"lease": 60, "max_crashes": 0, "keep_failed": 3600})
    assert changed == {"queue": "q", "lease": 60, "max_crashes": 0, "keep_failed": 3600}
    changed = await client.post("/queues/q/settings", {"retry": {"attempts": 0, "initial": 5}, "keep_completed": 60})
    assert changed["retry"]["initial"] == 5 and changed["retry"]["attempts"] == 0 and changed["lease"] == 60
    assert (changed["keep_completed"], changed["keep_failed"]) == (60, 3600)
    assert (await client.get("/settings?queue=q"))["settings"] == [changed]
    (stored,) = await client.store.operations.settings(["q"])
    assert stored.retry is not None and stored.retry.attempts is None
    changed = await client.post(
        "/queues/q/settings", dict.fromkeys(("retry", "lease", "keep_completed", "keep_failed"))
    )
    assert changed == {"queue": "q", "max_crashes": 0}
    await client.post("/queues/other/settings", {"lease": 5})
    headers = await client.token(Role.OPERATE, queues=("q",))
    assert [one["queue"] for one in (await client.get("/settings", headers=headers))["settings"]] == ["q"]
    await client.get("/settings?queue=other", headers=headers, expect=403)
    await client.post("/queues/other/settings", {"lease": 5}, headers=headers, expect=403)
    for wrong in ({"lease": -1}, {"lease": 0}, {"retry": {"multiplier": 0}}, {"unknown": 1}, {"retry": {"never": []}}):
        await client.post("/queues/q/settings", wrong, headers=headers, expect=400)


async def test_a_retry_by_body_and_key(client: Client) -> None:
    await failed(client, "q", ["E"] * 3)
    assert (await client.post("/queues/q/retry", {"path": "n=1", "preview": True}))["matching"] == 1
    assert len((await client.post("/queues/q/retry", {"text": '"n":2'}))["published"]) == 1
    assert (await client.post("/queues/q/retry", {"preview": True}))["matching"] == 2, "a retried one is left out"
    assert (await client.post("/queues/q/retry", {"key": "k", "preview": True}))["matching"] == 0


async def test_an_action_that_is_not_recorded_was_still_done(
    client: Client, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    id_ = (await client.post("/queues/q/messages", {"body": 1}))["id"]

    async def fail(action: object) -> None:
        raise StoreUnavailable("cut")

    monkeypatch.setattr(client.store.access, "record", fail)
    assert await client.post("/messages/cancel", {"ids": [id_]}) == {"ids": [id_]}
    await client.post("/queues/q/purge", {"states": ["PENDING"]}, expect=400)
    errors = [record.getMessage() for record in caplog.records if record.levelname == "ERROR"]
    assert errors == ["the action cancel by local was not recorded", "the action purge by local was not recorded"]


async def test_an_unsupported_verb_is_named(client: Client) -> None:
    assert "STREAMS" in (await client.get("/streams", expect=501))["message"]


async def test_health_metrics_and_unknown_paths(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    assert await client.call("GET", "/live") == {"ok": True}
    assert (await client.call("GET", "/ready"))["ok"] is True
    await client.post("/queues/q/messages", {"body": 1})
    client.state._overview_at = None
    text = (await client.http.get("/metrics")).text
    assert 'millpond_messages{queue="q",state="PENDING"} 1.0' in text
    assert 'millpond_http_requests_total{route="/api/v1/queues/{queue}/messages",status="200"} 1.0' in text
    for path in ("/nothing", "/api/v1", "/api/v1/nothing", "/api/v2/queues"):
        assert (await client.call("GET", path, expect=404))["error"] == "NotFound"
    await client.call("DELETE", "/api/v1/queues", expect=405)
    checks, has_queue = [], client.store.operations.has_queue

    async def counted(queue: str) -> bool:
        checks.append(queue)
        return await has_queue(queue)

    monkeypatch.setattr(client.store.operations, "has_queue", counted)
    monkeypatch.setattr(state_module, "_SAME_READY", 3600.0)
    for _ in range(10):
        await client.call("GET", "/ready")
    assert not checks, "one check serves all probes"
    await client.store.close()
    client.state._checked_at = None
    assert (await client.call("GET", "/ready", expect=503))["ok"] is False
