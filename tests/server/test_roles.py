"""Every route with every role, and the ways around a token."""

from __future__ import annotations

import asyncio
import itertools

import pytest

from millpond.errors import StoreUnavailable
from millpond.server.grants import Role, matches_any
from millpond.server.routes import ROUTES, Route
from millpond.server.tokens import matching, new_token
from tests.server.conftest import Client, Serve
from tests.waiting import until

ALLOWED = {
    Role.PUBLISH: {Role.PUBLISH},
    Role.CONSUME: {Role.CONSUME},
    Role.READ: {Role.READ, Role.OPERATE},
    Role.OPERATE: {Role.OPERATE},
}
"""Role of a route -> roles of tokens that may call it."""


def concrete(route: Route) -> str:
    return route.path.format(queue="q", id="01890a5d-ac96-774b-bcce-b302099a8057", worker="1", stream="s")


async def status(client: Client, route: Route, headers: dict[str, str]) -> int:
    given = headers if route.method == "GET" else {"content-type": "application/json", **headers}
    return (await client.http.request(route.method, concrete(route), headers=given, content=b"")).status_code


@pytest.mark.parametrize("role", Role)
async def test_every_route_with_every_role(client: Client, role: Role) -> None:
    headers = await client.token(role)
    for route in ROUTES:
        allowed = route.role is None or role in ALLOWED[route.role]
        got = await status(client, route, headers)
        assert (got != 403) is allowed and got != 401, (route.path, role, got)


async def test_without_a_token_only_health_answers_once_there_are_tokens(client: Client) -> None:
    await client.token(Role.READ)
    for route in ROUTES:
        for headers in (
            {},
            {"authorization": "Bearer "},
            {"authorization": "Basic eDp5"},
            {"authorization": "Bearer mp_a_b"},
        ):
            client.state.failed_logins.forget()
            got = await status(client, route, headers)
            assert (got == 401) is (route.role is not None), (route.path, headers, got)


async def test_a_token_reaches_its_queues_only(client: Client) -> None:
    headers = await client.token(*Role, queues=("orders.*", "plain"))
    for route in ROUTES:
        if "{queue}" in route.path:
            assert await status(client, route, headers) == 403, route.path
    publish = {"body": 1}
    for queue, expected in {"orders.eu": 200, "plain": 200, "orders": 403, "plainer": 403, "x.orders.eu": 403}.items():
        await client.post(f"/queues/{queue}/messages", publish, headers=headers, expect=expected)
    names = {queue["queue"] for queue in (await client.get("/queues", headers=headers))["queues"]}
    assert names == {"orders.eu", "plain"}
    await client.store.access.reset_tokens()
    client.state.tokens.forget()
    hidden = (await client.post("/queues/secret/messages", publish))["id"]
    headers = await client.token(*Role, queues=("orders.*",))
    await client.get(f"/messages/{hidden}", headers=headers, expect=404)
    await client.get("/messages", headers=headers, expect=403)
    await client.get("/messages?queue=secret", headers=headers, expect=403)
    for verb in ("cancel", "reschedule"):
        body = {"ids": [hidden], **({"priority": 1} if verb == "reschedule" else {})}
        assert await client.post(f"/messages/{verb}", body, headers=headers) == {"ids": []}
    assert "no such message" in str(await client.post("/messages/retry", {"ids": [hidden]}, headers=headers))
    for path in ("/streams", "/actions", "/failures"):
        await client.get(path, headers=headers, expect=403)
    assert b"secret" not in (await client.http.get("/metrics", headers=headers)).content


async def test_a_removed_token_ends(client: Client) -> None:
    headers = await client.token(Role.READ)
    await client.get("/queues", headers=headers)
    await client.token(Role.READ, name="other")
    await client.store.access.remove_token("test")
    client.state.tokens.forget()
    await client.get("/queues", headers=headers, expect=401)


async def test_a_waiting_claim_ends_with_its_token(client: Client) -> None:
    headers = await client.token(Role.CONSUME)
    asked = {"queues": ["q"], "wait": 60}
    waiting = asyncio.create_task(client.post("/claims", asked, headers=headers, expect=401))
    await until(lambda: client.state.waiting.taken == 1)
    await client.token(Role.READ, name="other")
    await client.store.access.remove_token("test")
    client.state.tokens.forget()
    assert "removed" in (await waiting)["message"]


async def test_wrong_tokens_are_slowed_down(client: Client) -> None:
    good = await client.token(Role.READ)
    codes = [
        (await client.http.get("/api/v1/queues", headers={"authorization": f"Bearer mp_x_{n}"})).status_code
        for n in range(40)
    ]
    assert codes[0] == 401 and codes[-1] == 429
    await client.get("/queues", headers=good)


async def test_the_end_of_the_last_token_opens_nothing(client: Client) -> None:
    await client.get("/queues")
    text, stored = new_token("soon", [Role.READ], ["*"], expires_us=1)
    await client.store.access.add_token(stored)
    client.state.tokens.forget()
    for headers in ({}, {"authorization": f"Bearer {text}"}):
        await client.get("/queues", headers=headers, expect=401)
    await client.token(Role.READ, name="soon")
    await client.store.access.remove_token("soon")
    client.state.tokens.forget()
    await client.get("/queues", expect=401)
    await client.store.access.reset_tokens()
    client.state.tokens.forget()
    await client.get("/queues")


@pytest.mark.parametrize("header", ["Forwarded", "Via", "X-Forwarded-For", "X-Real-IP", "x-forwarded-host"])
async def test_a_caller_behind_a_proxy_needs_a_token(client: Client, header: str) -> None:
    await client.get("/queues", headers={header: "127.0.0.1"}, expect=401)


async def test_a_cookie_of_another_server_does_not_lock_out_a_local_dashboard(client: Client) -> None:
    for name in ("millpond_token", "millpond_token_8420"):
        reply = await client.http.get("/dashboard", headers={"cookie": f"{name}=mp_a_b"})
        assert reply.status_code == 200


async def test_texts_of_the_database_stay_in_the_log(
    client: Client, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    await client.token(Role.READ)
    client.state.tokens.forget()

    async def fail() -> object:
        raise StoreUnavailable("no connection to anna@db.internal/shop")

    monkeypatch.setattr(client.store.access, "tokens", fail)
    for path in ("/api/v1/queues", "/dashboard"):
        reply = await client.http.get(path, headers={"authorization": "Bearer x"})
        assert reply.status_code == 503 and "db.internal" not in reply.text
    assert "db.internal" in caplog.text


async def test_a_page_of_another_site_changes_nothing(client: Client) -> None:
    publish = "/api/v1/queues/q/messages"
    for headers in (
        {"content-type": "text/plain"},
        {"content-type": "application/x-www-form-urlencoded"},
        {},
    ):
        reply = await client.http.post(publish, content=b'{"body": 1}', headers=headers)
        assert reply.status_code == 415
    for site in ("cross-site", "same-site"):
        await client.call("POST", publish, {"body": 1}, headers={"sec-fetch-site": site}, expect=403)
    for host in ("evil.example", "evil.example:8420", "127.0.0.1.evil.example", "x@evil.example", ""):
        await client.call("POST", publish, {"body": 1}, headers={"host": host}, expect=401)
    for host in ("localhost:8420", "127.0.0.1", "[::1]:8420"):
        await client.call("POST", publish, {"body": 1}, headers={"host": host})


async def test_no_reply_allows_other_origins(client: Client) -> None:
    for route in ROUTES:
        reply = await client.http.request(route.method, concrete(route), headers={"origin": "https://evil.example"})
        assert not [name for name in reply.headers if name.startswith("access-control")]
        assert reply.headers["x-content-type-options"] == "nosniff"
        assert "default-src 'none'" in reply.headers["content-security-policy"]


async def test_an_application_decides_by_its_own_login(serve: Serve) -> None:
    from millpond.server.grants import Grant

    async def resolver(request: object) -> Grant | None:
        user = request.headers.get("x-user")  # type: ignore[attr-defined]
        return Grant(user, frozenset({Role.READ})) if user else None

    client = await serve(resolver=resolver, host="0.0.0.0")  # noqa: S104 - not bound in this test
    await client.get("/queues", expect=401)
    await client.get("/queues", headers={"x-user": "anna"})
    await client.post("/queues/q/pause", headers={"x-user": "anna"}, expect=403)


def test_patterns_and_hashes() -> None:
    assert matches_any(("a*c",), "abc") and matches_any(("*",), "line\nbreak") and not matches_any(("a.c",), "abc")
    assert not matches_any((), "a") and not matches_any(("A",), "a")
    text, stored = new_token("t", [Role.READ], ["*"])
    secret = text.split("_", 2)[2]
    assert secret not in repr(stored) and text not in repr(stored)
    assert matching(text, {stored.id: stored}) is stored
    for wrong in ("", "mp", text[:-1], text + "x", text.replace("mp_", "xx_"), f"mp_{stored.id}_", f"mp__{secret}"):
        assert matching(wrong, {stored.id: stored}) is None
    assert len({new_token("t", [Role.READ], ["*"])[0] for _ in itertools.repeat(None, 50)}) == 50
