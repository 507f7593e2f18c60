"""Every page with every role, forms of other sites, masks, and a mount behind a prefix."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator
from datetime import datetime
from html import unescape
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from uuid import UUID

import httpx
import pytest
from starlette.applications import Starlette
from starlette.routing import Mount

from millpond import Message
from millpond.clock import SECOND, SystemClock, monotonic
from millpond.outcome import Reject
from millpond.schedule import Periodic
from millpond.server.dashboard import actions as actions_module
from millpond.server.dashboard import charts, live_counts, rendering
from millpond.server.dashboard.fields import database_now
from millpond.server.dashboard.login import inner_path
from millpond.server.dashboard.notices import notice
from millpond.server.dashboard.pages import _indented
from millpond.server.dashboard.table import PAGES
from millpond.server.grants import Role
from millpond.server.handlers.call import Call
from millpond.server.routes import Route
from millpond.server.settings import Limits
from tests.server.conftest import Client, Serve
from tests.waiting import until

ALLOWED = {Role.READ: {Role.READ, Role.OPERATE}, Role.OPERATE: {Role.OPERATE}}
REFERENCE = (Path(__file__).parent.parent.parent / "docs/how-to/dashboard.md").read_text()
HOUR = 3600 * SECOND
FORM = {"content-type": "application/x-www-form-urlencoded"}


def concrete(route: Route) -> str:
    path = route.path.format(id="01890a5d-ac96-774b-bcce-b302099a8057", worker="1", name="dashboard.css")
    return f"{path}?queue=q" if path.endswith("/queue") else path


async def opened(client: Client, path: str = "", *, expect: int = 200, **options: Any) -> str:
    reply = await client.http.get(f"/dashboard{path}", **options)
    assert reply.status_code == expect, (reply.status_code, reply.text)
    return reply.text


async def sent(client: Client, path: str, fields: dict[str, Any], **options: Any) -> httpx.Response:
    """Send a form with the value that the page gave to it."""
    form = client.http.cookies.get("millpond_form_8420") or ""
    return await client.http.post(f"/dashboard{path}", data={"form": form, **fields}, **options)


async def failed(client: Client, queue: str = "q", number: int = 1) -> list[UUID]:
    published = await client.store.publish([Message(queue=queue, payload=b'{"card": 1}') for _ in range(number)])
    claims = await client.store.claim([queue], number)
    await client.store.settle([Reject(c.receipt, "rejected", "ValueError: card 1") for c in claims])
    return [one.id for one in published]


@pytest.mark.parametrize("role", Role)
async def test_every_page_with_every_role(client: Client, role: Role) -> None:
    headers = await client.token(role)
    await failed(client)
    client.state.stopping.set()  # ends the events
    for route in PAGES:
        allowed = route.role is None or role in ALLOWED[route.role]
        reply = await client.http.request(route.method, concrete(route), headers={**headers, **FORM}, content=b"")
        refused = reply.status_code == 403 and "This needs the role" in reply.text
        assert refused is not allowed and (reply.status_code != 401 or "/log" in route.path), (route.path, role)
        assert reply.status_code < 500 or reply.status_code == 501
        policy = reply.headers["content-security-policy"]
        assert "unsafe" not in policy and "default-src 'none'" in policy and "frame-ancestors 'none'" in policy
        assert reply.headers["x-content-type-options"] == "nosniff"
        assert not [name for name in reply.headers if name.startswith("access-control")]


async def test_without_a_token_there_is_only_the_login(client: Client) -> None:
    await failed(client, "secret-queue")
    await client.token(Role.READ)
    for route in PAGES:
        for cookie in ("", "millpond_token_8420=mp_a_b"):
            client.state.failed_logins.forget()
            headers = {**FORM, **({"cookie": cookie} if cookie else {})}
            reply = await client.http.request(route.method, concrete(route), headers=headers, content=b"")
            assert (reply.status_code == 401) is (route.role is not None), (route.path, reply.status_code)
            assert "secret-queue" not in reply.text


async def test_the_token_in_the_cookie_opens_no_other_interface(client: Client) -> None:
    token = (await client.token(*Role))["authorization"].removeprefix("Bearer ")
    await opened(client, headers={"cookie": f"millpond_token_8420={token}"})
    await client.get("/queues", headers={"cookie": f"millpond_token_8420={token}"}, expect=401)


async def test_the_table_of_pages_is_that_of_the_server() -> None:
    listed = re.findall(r"^\| `([A-Z]+ \S+)` \| `?(\w+)`? \| (.*) \|$", REFERENCE, re.M)
    assert listed == [(f"{r.method} {r.path}", r.role.value if r.role else "none", r.summary) for r in PAGES]


async def test_no_page_has_a_script_or_style_of_its_own(client: Client) -> None:
    (id_,) = await failed(client)
    for path in ("", "/queue?queue=q", "/messages", f"/messages/{id_}", "/failures", "/actions", "/workers"):
        text = await opened(client, path)
        assert not re.search(r"<script(?! src=)|<style|\son\w+=|\sstyle=|javascript:", text), path


async def test_forms_of_other_sites_are_refused(client: Client) -> None:
    (id_,) = await failed(client)
    fields = {"act": "retry", "id": str(id_)}
    await opened(client)
    for headers in (
        {"sec-fetch-site": "cross-site"},
        {"sec-fetch-site": "same-site"},
        {"origin": "https://evil.example"},
        {"origin": "null"},
    ):
        reply = await sent(client, "/act", fields, headers=headers)
        assert reply.status_code == 403 and "other sites" in reply.text, headers
    for form in ("", "wrong", "é"):
        assert (await sent(client, "/act", {**fields, "form": form})).status_code == 403
    bare = {"cookie": "", **FORM}
    assert (await client.http.post("/dashboard/act", content="act=retry&form=", headers=bare)).status_code == 403
    json = await client.http.post("/dashboard/act", json=fields)
    assert json.status_code == 415
    assert (await client.http.get("/dashboard/act")).status_code == 303
    reply = await sent(client, "/act", fields, headers={"host": "evil.example"})
    assert reply.status_code == 401, "a page that moved its own name to this machine"
    assert await client.store.operations.browse("q") == []
    reply = await sent(client, "/act", fields, headers={"origin": "http://127.0.0.1:8420"})
    assert reply.status_code == 303 and len(await client.store.operations.browse("q")) == 1


async def test_only_the_confirmed_number_is_retried(client: Client) -> None:
    await failed(client, number=3)
    await opened(client)
    (group,) = await client.store.operations.failures("q")
    value = f'[{group.fingerprint},"q",1]'
    text = (await sent(client, "/confirm", {"act": "retry_failures", "group": value})).text
    assert "Retry 3 messages" in text, "the number is counted when it is asked"
    reply = await sent(client, "/act", {"act": "retry_failures", "group": value, "back": "/dashboard/failures"})
    assert reply.headers["location"] == "/dashboard/failures?done=retried-1"
    reply = await sent(client, "/act", {"act": "retry_failures", "group": value, "rate": "1000"})
    assert reply.headers["location"] == "/dashboard?done=background-1"
    for rate in ("0", "-1", "nan", "x", "1e9"):
        reply = await sent(client, "/act", {"act": "retry_failures", "group": value, "rate": rate})
        assert reply.status_code == 400, rate


async def test_all_failed_messages_that_match_are_retried(client: Client) -> None:
    await failed(client, number=3)
    await client.store.publish([Message(queue="q", payload=b"2")])
    (claim,) = await client.store.claim(["q"])
    await client.store.settle([Reject(claim.receipt, "rejected", "KeyError: other")])
    page = await opened(client, "/messages?queue=q&error=card")
    assert "Retry all failed that match" in page
    assert "Retry all failed" not in await opened(client, "/messages")
    fields = {"act": "retry_matching", "queue": "q", "error": "card"}
    question = (await sent(client, "/confirm", fields)).text
    assert "Retry 3 failed messages of q?" in question and 'name="error" value="card"' in question
    fields["messages"] = "2"
    assert "done=retried-2" in (await sent(client, "/act", fields)).headers["location"]
    assert "Retry 1 failed message of q?" in (await sent(client, "/confirm", fields)).text, "retried ones do not count"
    for wrong in ({"error": "nothing"}, {"queue": ""}, {"failure": "x"}, {"path": "x"}, {"since": "x"}):
        assert (await sent(client, "/confirm", {**fields, **wrong})).status_code == 400, wrong
    assert (await sent(client, "/act", {**fields, "messages": "x"})).status_code == 400
    assert (
        "done=background-1"
        in (await sent(client, "/act", {**fields, "messages": "1", "rate": "9"})).headers["location"]
    )
    headers = await client.token(Role.OPERATE, queues=("other",))
    for path in ("/confirm", "/act"):
        assert (await sent(client, path, fields, headers=headers)).status_code == 403


async def test_a_masked_queue_is_not_retried_by_its_texts(serve: Serve) -> None:
    client = await serve(mask={Role.OPERATE: ("q",)})
    await failed(client)
    headers = await client.token(Role.OPERATE)
    await opened(client, headers=headers)
    for text in ({"error": "card"}, {"text": "card"}, {"path": "card=1"}):
        fields = {"act": "retry_matching", "queue": "q", "messages": "1", **text}
        for path in ("/confirm", "/act"):
            assert (await sent(client, path, fields, headers=headers)).status_code == 403


async def test_a_message_is_completed_without_running(client: Client) -> None:
    (one,) = await client.store.publish([Message(queue="q", payload=b"1")])
    assert "Complete without running" in await opened(client, f"/messages/{one.id}")
    fields = {"act": "done", "id": str(one.id)}
    assert "Make 1 message COMPLETED?" in (await sent(client, "/confirm", fields)).text
    assert "done=completed-1" in (await sent(client, "/act", fields)).headers["location"]
    assert "done=nothing-0" in (await sent(client, "/act", fields)).headers["location"]
    (row,) = await client.store.operations.find([one.id])
    assert row.state == "COMPLETED"


async def test_only_confirmed_messages_are_deleted(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if the purge begins long after the form was read: its own clock reading decides nothing."""
    await failed(client, number=2)
    await opened(client)
    began = monotonic()
    asked = {"act": "purge", "queue": "q", "days": "0", "state": "FAILED"}
    question = (await sent(client, "/confirm", asked)).text
    assert "Delete 2 messages of q?" in question
    (before,) = re.findall(r'name="before" value="([^"]+)"', question)
    (later,) = await failed(client)
    since = monotonic() - began

    async def read_early(call: Call, queue: str) -> datetime:
        at = await database_now(call, queue)
        await asyncio.sleep(2 * since)
        return at

    monkeypatch.setattr(actions_module, "database_now", read_early)
    fields = {"act": "purge", "queue": "q", "before": unescape(before), "state": "FAILED"}
    assert "done=purged-2" in (await sent(client, "/act", fields)).headers["location"]
    assert [row.id for row in await client.store.operations.archived("q")] == [later]
    for wrong in ("", "x", "9999-01-01T00:00"):
        assert (await sent(client, "/act", {**fields, "before": wrong})).status_code == 400


async def test_a_machine_with_another_time_deletes_what_was_counted(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    await failed(client, number=2)
    await opened(client)
    for off in (-HOUR, HOUR):
        other = SimpleNamespace(now=lambda off=off: SystemClock().now() + off)
        monkeypatch.setattr(rendering, "SystemClock", lambda other=other: other)
        asked = {"act": "purge", "queue": "q", "days": "0", "state": "FAILED"}
        question = (await sent(client, "/confirm", asked)).text
        assert "Delete 2 messages of q?" in question and "All FAILED messages" in question
        assert "Replay 2 messages" in (await sent(client, "/confirm", {**asked, "act": "replay", "name": "again"})).text
    (before,) = re.findall(r'name="before" value="([^"]+)"', question)
    fields = {"act": "purge", "queue": "q", "before": unescape(before), "state": "FAILED"}
    assert "done=purged-2" in (await sent(client, "/act", fields)).headers["location"]


async def test_one_token_leaves_open_pages_to_others(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live_counts, "_MOST", 4)
    found = live_counts.LiveCounts(client.state)
    greedy = [found.events("greedy") for _ in range(3)]
    for events in greedy:
        await anext(events)
    assert found.is_full("greedy") and not found.is_full("other")
    assert [event async for event in found.events("greedy")] == [], "a page that asked at the same time"
    other = found.events("other")
    await anext(other)
    for events in (*greedy, other):
        await events.aclose()  # type: ignore[attr-defined]
    assert not found.is_full("greedy")


async def test_a_token_changes_and_sees_its_queues_only(client: Client) -> None:
    (own,), (other,) = await failed(client, "orders"), await failed(client, "secret")
    headers = await client.token(Role.OPERATE, queues=("orders",))
    await opened(client, headers=headers)
    for path in ("", "/failures", "/messages?queue=orders", "/messages"):
        assert "secret" not in await opened(client, path, headers=headers)
    assert "orders" in await opened(client, "/failures", headers=headers)
    for path in ("/queue?queue=secret", "/failures?queue=secret", "/messages?queue=secret", "/streams", "/actions"):
        assert await opened(client, path, headers=headers, expect=403)
    await opened(client, f"/messages/{other}", headers=headers, expect=404)
    for fields in (
        {"act": "pause", "queue": "secret"},
        {"act": "purge", "queue": "secret", "days": "0"},
        {"act": "retry_failures", "group": '[1,"secret",1]'},
        {"act": "release", "stream": "s"},
    ):
        for path in ("/confirm", "/act"):
            assert (await sent(client, path, fields, headers=headers)).status_code == 403, fields
    reply = await sent(client, "/act", {"act": "retry", "id": str(other)}, headers=headers)
    assert reply.headers["location"].endswith("done=nothing-1")
    reply = await sent(client, "/act", {"act": "retry", "id": str(own)}, headers=headers)
    assert "done=retried-1" in reply.headers["location"]
    recorded = [(action.actor, action.action) for action in await client.store.access.actions()]
    assert recorded == [("test", "retry"), ("test", "retry"), ("test", "release_stream")]


async def test_masked_bodies_stay_masked(serve: Serve) -> None:
    client = await serve(mask={Role.READ: ("q",)})
    (id_,) = await failed(client)
    reader, operator = await client.token(Role.READ), await client.token(Role.OPERATE, name="operator")
    assert "card&#34;: 1" not in await opened(client, f"/messages/{id_}", headers=reader)
    assert "hidden from your role" in await opened(client, f"/messages/{id_}", headers=reader)
    assert "card&#34;: 1" in await opened(client, f"/messages/{id_}", headers=operator)
    await opened(client, "/messages?queue=q&text=card", headers=reader, expect=403)


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"act": "nothing"},
        {"act": "retry"},
        {"act": "retry", "id": "x"},
        {"act": "retry_failures"},
        {"act": "retry_failures", "group": "[[["},
        {"act": "retry_failures", "group": '["x"]'},
        {"act": "pause", "queue": " "},
        {"act": "purge", "queue": "q", "days": "-1"},
        {"act": "purge", "queue": "q", "days": "9" * 30},
        {"act": "purge", "queue": "q", "days": "1", "state": "PENDING"},
    ],
)
async def test_wrong_forms_are_explained(client: Client, fields: dict[str, str]) -> None:
    await opened(client)
    for path in ("/confirm", "/act"):
        reply = await sent(client, path, fields)
        assert reply.status_code == 400 and "This cannot be done" in reply.text, (path, fields)


async def test_a_running_message_is_cancelled(serve: Serve, tmp_path: Path) -> None:
    client = await serve(f"sqlite:///{tmp_path / 'pond.db'}")
    (one,) = await client.store.publish([Message(queue="q", payload=b"1")])
    presence = await client.store.workers.join("w", queues=["q"])
    await presence.beat()
    await client.store.claim(["q"], 1, by_worker=True)
    page = await opened(client, f"/messages/{one.id}")
    assert "The worker w claimed it" in page and 'value="interrupt"' in page
    assert "Cancel 1 running message?" in (await sent(client, "/confirm", {"act": "interrupt", "id": str(one.id)})).text
    reply = await sent(client, "/act", {"act": "interrupt", "id": str(one.id)})
    assert reply.headers["location"].endswith("done=interrupted-1")
    (action,) = await client.store.access.actions()
    assert str(one.id) in action.detail and '"running":true' in action.detail
    await presence.leave()


async def test_wrong_changes_of_schedules_are_explained(client: Client) -> None:
    await client.store.periodic.declare([Periodic(name="nightly", queue="q", schedule="0 3 * * *")])
    await opened(client, "/periodic?name=nightly")
    await opened(client, "/periodic?name=other", expect=404)
    whole = {"act": "periodic_change", "name": "nightly", "schedule": "0 4 * * *", "timezone": "UTC", "missed": "skip"}
    for wrong in ({"schedule": "never"}, {"timezone": "Nowhere"}, {"missed": "x"}, {"name": ""}):
        assert (await sent(client, "/act", {**whole, **wrong})).status_code == 400, wrong
    assert (await sent(client, "/act", {**whole, "name": "other"})).status_code == 404
    some = await client.token(Role.OPERATE, queues=("q",))
    assert "Edit" not in await opened(client, "/periodic", headers=some)
    assert (await sent(client, "/act", whole, headers=some)).status_code == 403
    every = await client.token(Role.OPERATE, name="every")
    assert (await sent(client, "/act", whole, headers=every)).status_code == 303


async def test_a_search_that_reads_rows_is_not_repeated(client: Client) -> None:
    await failed(client)
    for query, is_live in {"": True, "?queue=q&state=FAILED": True, "?key=k": False, "?text=x&queue=q": False}.items():
        assert ("data-events" in await opened(client, f"/messages{query}")) is is_live, query
    cursor = (await client.get("/messages", params={"limit": 1, "state": "FAILED"})).get("cursor")
    assert "data-events" not in await opened(client, f"/messages?cursor={cursor}")


async def test_messages_of_a_time(client: Client) -> None:
    (id_,) = await failed(client)
    assert str(id_) in await opened(client, "/messages?since=2020-01-01T00:00&until=")
    assert str(id_) not in await opened(client, "/messages?until=2020-01-01T00:00")


@pytest.mark.parametrize(
    "query", ["queue=%00", "limit=0", "cursor=x", "state=x", "nope=1", "failure=x", "queue=a&queue=b"]
)
async def test_wrong_queries_are_explained(client: Client, query: str) -> None:
    assert "This cannot be done" in await opened(client, f"/messages?{query}", expect=400)


async def test_an_address_that_is_no_page(client: Client) -> None:
    page = await opened(client, "/nothing/at<b>all", expect=404)
    assert "There is no page" in page and "<b>all" not in page and 'href="/dashboard/failures"' in page
    for path, to in (("/", "/dashboard"), ("/failures/", "/dashboard/failures"), ("//evil.example/", None)):
        reply = await client.http.get(f"/dashboard{path}")
        assert reply.status_code == 307 and reply.headers["location"].startswith(to or "/dashboard/"), path
    assert 'href="/dashboard/failures"' in await opened(client, "/messages?limit=0", expect=400), "the way on is there"
    await client.token(Role.READ)
    assert "Log in" in await opened(client, "/nothing", expect=401)


async def test_a_wrong_token_shows_the_login_only(client: Client) -> None:
    await client.token(Role.READ)
    await opened(client, expect=401)
    reply = await sent(client, "/login", {"token": "mp_1_2", "next": "/dashboard/failures?queue=q"})
    assert reply.status_code == 401 and "This token is unknown" in reply.text
    assert "<nav" not in reply.text
    assert 'name="next" value="/dashboard/failures?queue=q"' in reply.text, "the page that was asked for"
    reply = await sent(client, "/act", {"act": "retry", "back": "/dashboard/failures"})
    assert reply.status_code == 401 and 'name="next" value="/dashboard"' in reply.text, "no form is sent again"


async def test_the_address_of_a_form_leads_to_the_overview(client: Client) -> None:
    for path in ("/login", "/logout", "/act", "/confirm"):
        reply = await client.http.get(f"/dashboard{path}")
        assert (reply.status_code, reply.headers["location"]) == (303, "/dashboard")


async def test_slow_logins_of_one_address_leave_places_to_others(serve: Serve) -> None:
    client = await serve(limits=Limits(connections=4))
    token = await client.token(Role.READ)
    ended = asyncio.Event()

    async def slow() -> AsyncIterator[bytes]:
        yield b"token="
        await ended.wait()

    forms = [client.http.post("/dashboard/login", content=slow(), headers=FORM) for _ in range(4)]
    slow_ones = [asyncio.create_task(form) for form in forms]
    await until(lambda: any(one.done() for one in slow_ones))
    assert [one.result().status_code for one in slow_ones if one.done()] == [429]
    await opened(client, headers=token)
    ended.set()
    assert {reply.status_code for reply in await asyncio.gather(*slow_ones)} == {403, 429}


async def test_behind_a_prefix(client: Client) -> None:
    (id_,) = await failed(client)
    outer = Starlette(routes=[Mount("/queue", app=client.app)])
    transport = httpx.ASGITransport(app=outer)
    async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1:8420") as http:
        assert (await http.get("/queue/")).headers["location"] == "/queue/dashboard"
        page = await http.get("/queue/dashboard")
        links = re.findall(r'(?:href|src|action|data-events)="([^"#]+)"', page.text)
        assert links and all(link.startswith("/queue/dashboard") for link in links)
        for link in links:
            if "events" not in link:
                assert (await http.get(link.replace("&amp;", "&"))).status_code in (200, 303), link
        (cookie,) = [cookie for cookie in http.cookies.jar if cookie.name == "millpond_form_8420"]
        assert cookie.path == "/queue/dashboard"
        fields = {"act": "retry", "id": str(id_), "form": cookie.value, "back": "/dashboard"}
        reply = await http.post("/queue/dashboard/act", data=fields)
        assert reply.headers["location"].startswith("/queue/dashboard/messages/")
        assert (await http.get(reply.headers["location"])).status_code == 200


@pytest.mark.parametrize(
    "text", ["//evil", "https://evil", "/dashboardx", "/dashboard/\\evil", "/dashboard/\r\nx: y", ""]
)
def test_redirects_stay_inside(text: str) -> None:
    assert inner_path(text) == "/dashboard"


def test_notices_are_fixed_texts() -> None:
    assert notice("retried-3") == "3 messages published again."
    for text in ("", "retried", "retried-x", "<b>-1", "retried-<b>", "retried-9999999999999", "retried-²"):
        assert notice(text) is None


def test_ticks_of_whole_numbers_are_whole() -> None:
    chart = charts.waiting([live_counts.Sample(0.0, 0.0, 0.0, 1)])
    assert [text for _, text in chart.ticks] == ["0", "1"]


def test_the_first_sample_of_a_chart_is_a_dot() -> None:
    first = live_counts.Sample(0.0, 5.0, 1.0, 7)
    (line,) = charts.waiting([first]).lines
    assert len(set(line.points.split())) == 1 and len(line.points.split()) == 2
    assert len(charts.waiting([first, first]).lines[0].points.split()) == 2


async def test_pages_of_odd_messages(client: Client) -> None:
    odd = [b"", b"\xff", b"nul\x00", b'"\\ud800"', b"[" * 5000, b'{"a":' * 100, b"1" * 200_000]
    published = await client.store.publish([Message(queue="q", payload=payload) for payload in odd])
    for one in published:
        await opened(client, f"/messages/{one.id}")
    await opened(client, "/messages")


async def test_the_lag_of_a_stream_is_shown(serve: Serve, tmp_path: Path) -> None:
    client = await serve(f"sqlite:///{tmp_path}/q.db")
    await client.store.publish([Message(queue="orders", payload=b"1") for _ in range(1502)])
    epoch, acked = await client.store.streams.open("audit")
    await client.store.streams.claim("audit", epoch, acked + 1, ["orders"], 2)
    await client.store.streams.open("idle")
    page = await opened(client, "/streams")
    assert '<td title="orders">1,500</td>' in page and "not known" in page
    audit, idle = (await client.get("/streams"))["streams"]
    assert (audit["waiting"], audit["queues"], "waiting" in idle) == (1500, ["orders"], False)


async def test_a_waiting_message_is_rescheduled(client: Client) -> None:
    (published,) = await client.store.publish([Message(queue="q", payload=b"1")])
    id_ = published.id
    assert "Reschedule" in await opened(client, f"/messages/{id_}")
    fields = {"act": "reschedule", "id": str(id_), "due_at": "2040-01-31T08:30", "priority": "7"}
    reply = await sent(client, "/act", {**fields, "back": f"/dashboard/messages/{id_}"})
    assert reply.headers["location"].endswith("done=rescheduled-1")
    (row,) = await client.store.operations.browse("q")
    assert (row.priority, row.due_at.isoformat()) == (7, "2040-01-31T08:30:00+00:00")
    await sent(client, "/act", {**fields, "due_at": "", "priority": "9"})
    (row,) = await client.store.operations.browse("q")
    assert (row.priority, row.due_at.year) == (9, 2040)
    for wrong in ({"due_at": "soon"}, {"priority": "101"}, {"priority": "-1"}, {"due_at": "", "priority": ""}):
        assert (await sent(client, "/act", {**fields, **wrong})).status_code == 400, wrong
    await client.store.operations.cancel([id_])
    assert (await sent(client, "/act", fields)).headers["location"].endswith("done=nothing-0")
    assert "Reschedule" not in await opened(client, f"/messages/{id_}")


async def test_archived_messages_are_replayed_after_a_question(client: Client) -> None:
    await failed(client, number=3)
    await opened(client, "/queue?queue=q")
    fields = {"act": "replay", "queue": "q", "state": "FAILED", "to": "repaired", "name": "after the fix"}
    question = (await sent(client, "/confirm", fields)).text
    assert "Replay 3 messages of q?" in question and "to repaired" in question
    (until,) = re.findall(r'name="until" value="([^"]+)"', question)
    await failed(client)
    fields["until"] = unescape(until)
    assert "done=replayed-3" in (await sent(client, "/act", fields)).headers["location"]
    assert len(await client.store.operations.browse("repaired")) == 3
    assert "done=replayed_before-0" in (await sent(client, "/act", fields)).headers["location"]
    for wrong in ({"name": " "}, {"state": "PENDING"}, {"since": "x"}, {"queue": ""}, {"until": "2000-01-01T00:00"}):
        assert (await sent(client, "/confirm", {**fields, **wrong})).status_code == 400, wrong
    headers = await client.token(Role.OPERATE, queues=("q",))
    for path in ("/confirm", "/act"):
        assert (await sent(client, path, fields, headers=headers)).status_code == 403


@pytest.mark.parametrize(
    ("raw", "shown"),
    [
        (rb'"\u00c5se \uD83E\udd86"', '"Åse \N{DUCK}"'),
        (rb'"\\u00c5 \\\u00e5"', r'"\\u00c5 \\å"'),
        (rb'"\u202e \u0041 \n \ud83e \u0000"', r'"\u202e \u0041 \n \ud83e \u0000"'),
        (b"no JSON: \\u00e5", "no JSON: å"),
    ],
)
def test_letters_of_a_body_are_shown_and_invisible_characters_escaped(raw: bytes, shown: str) -> None:
    assert _indented(raw) == shown


async def test_the_next_messages_of_a_queue_wait(client: Client) -> None:
    first, second = await client.store.publish([Message(queue="q", payload=b"1"), Message(queue="q", payload=b"2")])
    await client.store.claim(["q"], 1)
    page = await opened(client, "/queue?queue=q")
    assert str(second.id) in page and str(first.id) not in page


async def test_a_refused_form_leads_back(client: Client) -> None:
    await client.store.publish([Message(queue="q", payload=b"1")])
    await opened(client, "/queue?queue=q")
    fields = {"act": "purge", "queue": "q", "days": "0", "back": "/dashboard/queue?queue=q"}
    reply = await sent(client, "/confirm", fields)
    assert reply.status_code == 400 and "nothing to delete" in reply.text
    assert '<a class="button" href="/dashboard/queue?queue=q" data-focus>Go back</a>' in reply.text
