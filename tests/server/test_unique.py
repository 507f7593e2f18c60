"""Unique messages over HTTP and gRPC; the reply has the effect."""

from __future__ import annotations

from typing import Any

import grpc
import pytest

import millpond
from millpond.server.rpc import wire
from millpond.server.run_server import serving
from millpond.server.settings import ServerSettings
from tests.server.conftest import Client
from tests.server.rpc_client import rpc_client

NEW, UNIQUE = wire.message("NewMessage"), wire.message("Unique")
PATH = "/queues/q/messages"


async def test_http_tells_the_effect_on_the_message_that_has_the_value(client: Client) -> None:
    first = await client.post(PATH, {"body": 1, "unique": "v"})
    assert (first["new"], first["result"]) == (True, "published")
    assert await client.post(PATH, {"body": 2, "unique": "v"}) == {"id": first["id"], "new": False, "result": "kept"}
    replaced = await client.post(PATH, {"body": 3, "unique": "v", "on_conflict": "replace"})
    assert (replaced["id"], replaced["result"]) == (first["id"], "replaced")
    postponed = await client.post(PATH, {"body": 4, "unique": "v", "delay": 3600, "on_conflict": "postpone"})
    assert (postponed["id"], postponed["result"]) == (first["id"], "postponed")
    (message,) = (await client.get("/messages"))["messages"]
    assert message["body"] == 3 and message["due_at"] > message["created_at"]
    refused = await client.post(PATH, {"body": 5, "unique": "v", "on_conflict": "raise"}, expect=409)
    assert (refused["error"], refused["id"]) == ("NotUnique", first["id"])
    assert "result" not in await client.post(PATH, {"body": 6})


@pytest.mark.parametrize(("rule", "new"), [({}, True), ({"while": "unfinished"}, False), ({"while": 3600}, False)])
async def test_while_says_how_long_a_value_is_taken(client: Client, rule: dict[str, Any], new: bool) -> None:
    await client.post(PATH, {"body": 1, "unique": "v", **rule})
    (claim,) = (await client.post("/claims", {"queues": ["q"]}))["claims"]  # it runs
    assert (await client.post(PATH, {"body": 2, "unique": "v", **rule}))["new"] is new
    await client.post("/claims/ack", {"receipts": [claim["receipt"]]})
    result = (await client.post(PATH, {"body": 3, "unique": "v", **rule}))["result"]
    assert result == ("published" if rule.get("while") == "unfinished" else "kept")


async def test_a_batch_has_the_effect_of_each_message(client: Client) -> None:
    messages = [{"body": n, "unique": value} for n, value in enumerate("aba")] + [{"body": 3}]
    published = (await client.post(f"{PATH}/batch", {"messages": messages}))["published"]
    assert [one.get("result") for one in published] == ["published", "published", "kept", None]
    assert published[2]["id"] == published[0]["id"]
    raising = [{"body": 1, "unique": "c", "on_conflict": "raise"}, {"body": 2}]
    await client.post(f"{PATH}/batch", {"messages": raising}, expect=400)
    assert len((await client.get("/messages"))["messages"]) == 3


@pytest.mark.parametrize(
    "wrong",
    [
        {"while": "waiting"},
        {"on_conflict": "keep"},
        {"unique": "", "on_conflict": "keep"},
        {"unique": "v", "while": "for ever"},
        {"unique": "v", "while": -1},
        {"unique": "v", "on_conflict": "drop"},
        {"unique": "v", "id": "018f7b1e-0000-7000-8000-000000000000"},
        {"unique": "v" * 256},
    ],
)
async def test_wrong_rules_are_refused(client: Client, wrong: dict[str, Any]) -> None:
    await client.post(PATH, {"body": 1, **wrong}, expect=400)
    assert (await client.get("/messages"))["messages"] == []


async def test_grpc_tells_the_effect_on_the_message_that_has_the_value() -> None:
    store = await millpond.connect("memory://")
    async with serving(store, ServerSettings(port=0, grpc_port=0)) as running:
        assert running.grpc_address is not None
        async with rpc_client(running.grpc_address) as client:

            async def publish(*rules: dict[str, Any] | None) -> list[tuple[str, bool, str]]:
                new = [NEW(body=b"1", unique=None if rule is None else UNIQUE(**rule)) for rule in rules]
                reply = await client.Publish(queue="q", messages=new)
                return [(one.id, one.new, one.result) for one in reply.published]

            first, second, plain = await publish({"value": "v"}, {"value": "v"}, None)
            assert first[1:] == (True, "published") and second == (first[0], False, "kept") and plain[2] == ""
            assert await publish({"value": "v", "on_conflict": "REPLACE"}) == [(first[0], False, "replaced")]
            assert await publish({"value": "v", "on_conflict": "POSTPONE"}) == [(first[0], False, "postponed")]
            with pytest.raises(grpc.aio.AioRpcError, match=first[0]) as taken:
                await publish({"value": "v", "on_conflict": "RAISE"})
            assert taken.value.code() is grpc.StatusCode.ALREADY_EXISTS
            for wrong in (
                [{"value": ""}],
                [{"value": "w", "window": -1.0}],
                [{"value": "w", "window": 5.0, "unfinished": True}],
                [{"value": "w", "on_conflict": 9}],
                [{"value": "w", "on_conflict": "RAISE"}, None],
            ):
                with pytest.raises(grpc.aio.AioRpcError) as refused:
                    await publish(*wrong)  # type: ignore[arg-type]
                assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
            for claim in await store.claim(["q"], 10):
                await store.settle([millpond.Ack(claim.receipt)])
            kept = await publish({"value": "v", "window": 3600.0})
            assert kept == [(first[0], False, "kept")]
            assert (await publish({"value": "v", "unfinished": True}))[0][1:] == (True, "published")
    await store.close()
