"""gRPC: publish, streams with flow control, settle by receipts and ids, roles, and clients that leave."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from importlib import resources
from pathlib import Path
from typing import Any
from uuid import UUID, uuid4

import grpc
import httpx
import msgspec
import pytest
from grpc_tools import protoc

import millpond
from millpond import Message, State, Transport
from millpond.clock import monotonic
from millpond.control import Control
from millpond.server.grants import Role
from millpond.server.receipts import parse_receipt
from millpond.server.rpc import streams as streams_module
from millpond.server.rpc import wire
from millpond.server.rpc.service import ROLES
from millpond.server.run_server import RunningServer, serving
from millpond.server.settings import Limits, ServerSettings
from millpond.server.tokens import new_token
from tests.server.rpc_client import RpcClient, received, rpc_client
from tests.shared import KINDS, empty_database
from tests.waiting import until

NEW = wire.message("NewMessage")
FOLDER = Path(wire.__file__).parent


@pytest.fixture(params=KINDS)
def url(request: pytest.FixtureRequest) -> str:
    return empty_database(request, request.param)


@pytest.fixture
async def store(url: str) -> AsyncIterator[Transport]:
    store = await millpond.connect(url, migrate=True)
    yield store
    await store.close()


@pytest.fixture
async def running(url: str, store: Transport) -> AsyncIterator[RunningServer]:
    transport = await millpond.connect(url)
    async with serving(transport, ServerSettings(port=0, grpc_port=0)) as running:
        yield running
    await transport.close()


@pytest.fixture
async def client(running: RunningServer) -> AsyncIterator[RpcClient]:
    assert running.grpc_address is not None
    async with rpc_client(running.grpc_address) as client:
        yield client


async def test_messages_are_published_streamed_and_settled(client: RpcClient, store: Transport) -> None:
    id_ = str(uuid4())
    new = NEW(body=b'{"sku": 7}', id=id_, key="k", priority=3, headers={"trace": "x"})
    text = NEW(body="🦆".encode(), content_type="text/plain; charset=utf-8")
    reply = await client.Publish(
        queue="q", messages=[new, text, NEW(body=b"\x00", content_type="application/octet-stream")]
    )
    assert [published.new for published in reply.published] == [True, True, True]
    assert not (await client.Publish(queue="q", messages=[new])).published[0].new
    call = client.MessageStream(queues=["q"])
    first, second, third = await received(call, 3)
    assert (first.id, first.body, first.key, first.priority) == (id_, b'{"sku": 7}', "k", 3)
    assert dict(first.headers) == {"trace": "x"} and first.deliveries == 1 and first.attempts == 0
    assert second.content_type.startswith("text/plain") and third.body == b"\x00"
    assert (await client.MessageAck(receipts=[first.receipt])).refused == []
    assert (await client.MessageNack(receipts=[second.receipt], delay=3600, error="E")).refused == []
    assert (await client.MessageReject(queue="q", ids=[third.id], reason="no")).refused == []
    rows = {str(row.id): row for row in await store.operations.find([m.id for m in (first, second, third)])}
    assert [rows[m.id].state for m in (first, second, third)] == [State.COMPLETED, State.RETRYABLE, State.FAILED]
    assert [attempt.error for attempt in rows[second.id].failed_attempts] == ["E"]
    assert (await client.MessageAck(receipts=[second.receipt])).refused == [second.receipt]
    call.cancel()


async def test_ack_by_ids_as_vitess_has_it(client: RpcClient, store: Transport) -> None:
    await client.publish("q", b"1", b"2")
    call = client.MessageStream(queues=["q", "r"])
    one, two = await received(call, 2)
    unknown = str(uuid4())
    assert (await client.MessageAck(queue="q", ids=[one.id, unknown])).refused == [unknown]
    assert (await client.MessageAck(queue="r", ids=[two.id])).refused == [two.id], "the wrong queue"
    assert (await client.MessageAck(queue="q", ids=[two.id])).refused == []
    assert (await client.MessageAck(queue="q", ids=[two.id])).refused == [two.id], "settled before"
    (stats,) = await store.operations.count(["q"])
    assert stats.counts[State.COMPLETED] == 2
    call.cancel()


@pytest.mark.long_on_servers
async def test_metrics_of_streams_and_calls(client: RpcClient, running: RunningServer) -> None:
    await client.publish("q", b"1", b"2")
    calls = [client.MessageStream(queues=["q"], max_messages=1) for _ in range(2)]
    held = [message for call in calls for message in await received(call, 1)]
    with pytest.raises(grpc.aio.AioRpcError):
        await client.Publish(queue="")
    async with httpx.AsyncClient(base_url=running.url, timeout=60) as http:
        text = (await http.get("/metrics")).text
        assert 'millpond_grpc_subscribers{queue="q"} 2.0' in text
        assert 'millpond_grpc_outstanding_messages{queue="q"} 2.0' in text
        assert 'millpond_grpc_calls_total{code="OK",method="Publish"} 1.0' in text
        assert 'millpond_grpc_calls_total{code="INVALID_ARGUMENT",method="Publish"} 1.0' in text
        await client.MessageAck(receipts=[held[0].receipt])
        for call in calls:
            call.cancel()
        counted = 'millpond_grpc_calls_total{code="CANCELLED",method="MessageStream"} 2.0'

        async def ended() -> bool:
            return counted in (await http.get("/metrics")).text

        await until(ended)
        assert 'millpond_grpc_subscribers{queue="q"}' not in (await http.get("/metrics")).text


@pytest.mark.long_on_servers
async def test_flow_control_by_messages_and_bytes(client: RpcClient, running: RunningServer) -> None:
    await client.publish("q", *(b"%d" % n for n in range(20)))
    call = client.MessageStream(queues=["q"], max_messages=3)
    held = await received(call, 3)
    assert running.rpc is not None
    streams = running.rpc.service.streams
    assert len(streams.sent) == 3
    await client.MessageAck(receipts=[held[0].receipt])
    held = [*held[1:], *await received(call, 1)]
    assert [m.body for m in held] == [b"1", b"2", b"3"] and len(streams.sent) == 3
    call.cancel()
    await until(lambda: not streams.sent)

    await client.publish("big", *(b'"%s"' % (b"x" * 1000) for _ in range(5)))
    call = client.MessageStream(queues=["big"], max_bytes=2500)
    await received(call, 2)
    assert len(streams.sent) == 2
    small = client.MessageStream(queues=["big"], max_bytes=1)
    assert len(await received(small, 1)) == 1, "one is always sent"
    small.cancel()
    call.cancel()


@pytest.mark.long_on_servers
async def test_a_full_stream_claims_nothing(
    client: RpcClient, running: RunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    streams = running.state.streams
    claim, claims = streams.claim, []

    async def counted(queue: str, limit: int) -> Any:
        claims.append(limit)
        return await claim(queue, limit)

    monkeypatch.setattr(streams, "claim", counted)
    await client.publish("big", *(b'"%s"' % (b"x" * 1000) for _ in range(5)))
    call = client.MessageStream(queues=["big"], max_bytes=2500)
    held = await received(call, 2)
    for _ in range(30):  # time for a loop that does not wait
        await client.publish("other", b"1")
    assert len(claims) <= 2
    await client.MessageAck(receipts=[held[0].receipt])
    await received(call, 1)
    assert len(claims) <= 4
    call.cancel()


async def test_a_stale_receipt_is_not_extended(client: RpcClient) -> None:
    await client.publish("q", b"1")
    call = client.MessageStream(queues=["q"], lease=1)
    (first,) = await received(call, 1)
    (second,) = await received(call, 1)
    assert first.id == second.id
    assert (await client.MessageExtend(receipts=[first.receipt], lease=60)).refused == [first.receipt]
    assert (await client.MessageExtend(receipts=[second.receipt], lease=60)).refused == []
    call.cancel()


async def test_messages_settled_by_http_or_elsewhere_free_the_room(
    client: RpcClient, running: RunningServer, store: Transport
) -> None:
    await client.publish("q", b"1", b"2", b"3")
    call = client.MessageStream(queues=["q"], max_messages=1, lease=3600)
    (first,) = await received(call, 1)
    async with httpx.AsyncClient(base_url=f"{running.url}/api/v1") as http:
        reply = await http.post("/claims/ack", json={"receipts": [first.receipt]})
        assert reply.json() == {"refused": []}
        (second,) = await received(call, 1)
        await http.post("/claims/extend", json={"receipts": [second.receipt], "lease": 7200})
        (sent,) = running.state.streams.sent.values()
        assert sent.until > monotonic() + 7000
    assert await store.settle([millpond.Ack(parse_receipt(second.receipt).receipt)]) == []
    (third,) = await received(call, 1)
    assert third.body == b"3"
    call.cancel()


@pytest.mark.long_on_servers
async def test_a_stream_consumes_its_queues_only(client: RpcClient, store: Transport) -> None:
    (id_,) = await client.publish("other", b"1")
    call = client.MessageStream(queues=["q", "r"])
    await call.initial_metadata()

    async def recorded() -> bool:
        return [worker.queues for worker in await store.workers.status()] == [("q", "r")]

    await until(recorded)
    why = await Control(store).why(UUID(id_))
    assert [reason.kind for reason in why.reasons] == ["no-worker"]
    call.cancel()


@pytest.mark.long_on_servers
async def test_a_stream_survives_an_unexpected_error(
    client: RpcClient, running: RunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    claim = running.state.transport.claim
    failed = asyncio.Event()

    async def fail(*args: Any, **options: Any) -> Any:
        failed.set()
        raise RuntimeError("of a driver")

    monkeypatch.setattr(running.state.transport, "claim", fail)
    call = client.MessageStream(queues=["q"])
    await client.publish("q", b"1")
    await failed.wait()
    monkeypatch.setattr(running.state.transport, "claim", claim)
    assert len(await received(call, 1)) == 1
    call.cancel()


# With little room the pace of the clients counts too, which a busy machine changes.
@pytest.mark.long_on_servers
@pytest.mark.parametrize(("room", "within"), [(10, 0.5), (1200, 0.2)])
async def test_each_message_goes_to_one_subscriber_and_all_get_a_fair_share(
    client: RpcClient, store: Transport, room: int, within: float
) -> None:
    calls = [client.MessageStream(queues=["q"], max_messages=room) for _ in range(12)]
    for call in calls:
        await call.initial_metadata()
    total = 1200
    await client.publish("q", *(b"%d" % n for n in range(total)))
    seen: Counter[str] = Counter()
    shares: Counter[int] = Counter()

    async def consume(number: int, call: Any) -> None:
        while sum(shares.values()) < total:
            messages = (await call.read()).messages
            seen.update(m.id for m in messages)
            shares[number] += len(messages)
            await client.MessageAck(receipts=[m.receipt for m in messages])

    tasks = [asyncio.create_task(consume(n, call)) for n, call in enumerate(calls)]
    await until(lambda: sum(shares.values()) >= total)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert set(seen.values()) == {1} and len(seen) == total
    fair = total / len(calls)
    assert all(abs(share - fair) <= within * fair for share in shares.values()), shares
    for call in calls:
        call.cancel()


async def test_messages_of_a_client_that_leaves_go_back_at_once(client: RpcClient, store: Transport) -> None:
    await client.publish("q", b"1", b"2")
    leaving = client.MessageStream(queues=["q"], lease=3600)
    messages = await received(leaving, 2)
    leaving.cancel()
    again = client.MessageStream(queues=["q"])
    second = await received(again, 2)
    assert {m.id for m in second} == {m.id for m in messages}  # given back one by one, so in either order
    assert (await client.MessageAck(receipts=[messages[0].receipt])).refused == [messages[0].receipt]
    rows = await store.operations.find([m.id for m in messages])
    assert all((row.crashes, row.attempts) == (0, 0) for row in rows)
    again.cancel()


async def test_messages_of_a_slow_client_go_back_unless_they_are_extended(
    client: RpcClient, store: Transport, monkeypatch: pytest.MonkeyPatch
) -> None:
    await client.publish("q", b"1", b"2")
    slow = client.MessageStream(queues=["q"], lease=2, max_messages=2)
    late, extended = await received(slow, 2)
    assert (await client.MessageExtend(receipts=[extended.receipt], lease=600)).refused == []
    (back,) = await received(slow, 1)
    assert (back.id, back.deliveries, back.attempts) == (late.id, 2, 0)
    assert (await client.MessageAck(receipts=[extended.receipt])).refused == []
    assert (await client.MessageAck(receipts=[late.receipt])).refused == [late.receipt]
    (row,) = await store.operations.find([late.id])
    assert row.crashes == 0
    slow.cancel()


@pytest.mark.long_on_servers
async def test_a_client_that_does_not_read_keeps_no_messages_from_others(
    client: RpcClient, running: RunningServer, store: Transport
) -> None:
    for _ in range(6):  # more than the buffers on the way to a client take
        await client.publish("q", *[b'"' + b"x" * 512 * 1024 + b'"'] * 10)
    stuck = client.MessageStream(queues=["q"], lease=3, max_messages=1000, max_bytes=256 * 1024 * 1024)
    await stuck.initial_metadata()
    (subscriber,) = running.state.streams.subscribers
    await until(lambda: subscriber.is_stuck and not subscriber.sent)
    assert subscriber._outbox and not any(sent.claim for sent in subscriber._outbox), "it keeps their bodies"
    assert running.grpc_address is not None
    async with rpc_client(running.grpc_address) as other:
        quick = other.MessageStream(queues=["q"])
        deliveries: Counter[int] = Counter()
        while deliveries.total() < 60:
            messages = (await quick.read()).messages
            deliveries.update(message.deliveries for message in messages)
            assert (await other.MessageAck(receipts=[message.receipt for message in messages])).refused == []
        assert deliveries.keys() <= {1, 2}, "a message that was not sent does not count as delivered"
        assert deliveries[1]
        quick.cancel()
    (last,) = await client.publish("q", b"1")
    while (message := (await received(stuck, 1))[-1]).id != last:  # it reads again, and gets messages again
        pass
    assert (await client.MessageAck(receipts=[message.receipt])).refused == []
    stuck.cancel()


async def test_a_stopping_server_gives_back_and_ends_streams(url: str, store: Transport) -> None:
    transport = await millpond.connect(url)
    async with serving(transport, ServerSettings(port=0, grpc_port=0)) as running:
        assert running.grpc_address is not None
        async with rpc_client(running.grpc_address) as client:
            (id_,) = await client.publish("q", b"1")
            call = client.MessageStream(queues=["q"])
            await received(call, 1)
            running.state.stopping.set()
            assert await call.read() is grpc.aio.EOF
    await transport.close()
    (row,) = await store.operations.find([id_])  # type: ignore[list-item]
    assert (row.state, row.crashes) == (State.PENDING, 0)
    assert await store.workers.status() == []


@pytest.mark.long_on_servers
@pytest.mark.parametrize("method", ROLES)
async def test_every_method_with_every_role(running: RunningServer, store: Transport, method: str) -> None:
    assert running.grpc_address is not None and set(ROLES) == set(wire.methods())
    codes: dict[str, grpc.StatusCode] = {}
    for role in [*Role, None, "wrong"]:
        text, stored = new_token("t", [role] if isinstance(role, Role) else [], ["q"])
        await store.access.add_token(stored)
        running.state.tokens.forget()
        async with rpc_client(running.grpc_address, text if isinstance(role, Role) else role) as client:
            fields = {"queues": ["q"]} if method == "MessageStream" else {} if "Message" in method else {"queue": "q"}
            try:
                reply = getattr(client, method)(**fields)
                if method == "MessageStream":
                    await reply.initial_metadata()
                    codes[str(role)] = await reply.code() if reply.done() else grpc.StatusCode.OK
                    reply.cancel()
                else:
                    await reply
                    codes[str(role)] = grpc.StatusCode.OK
            except grpc.aio.AioRpcError as e:
                codes[str(role)] = e.code()
    expected: dict[str, grpc.StatusCode] = {
        role.value: grpc.StatusCode.OK if role is ROLES[method] else grpc.StatusCode.PERMISSION_DENIED for role in Role
    }
    unknown = dict.fromkeys(("None", "wrong"), grpc.StatusCode.UNAUTHENTICATED)
    assert codes == expected | unknown


@pytest.mark.long_on_servers
async def test_a_token_reaches_its_queues_only(running: RunningServer, store: Transport) -> None:
    text, stored = new_token("t", list(Role), ["a.*"])
    await store.access.add_token(stored)
    running.state.tokens.forget()
    await store.publish([Message(queue="b", payload=b"1")])
    assert running.grpc_address is not None
    async with rpc_client(running.grpc_address, text) as client:
        await client.publish("a.1", b"1")
        for wrong in (
            client.Publish(queue="b", messages=[NEW(body=b"1")]),
            client.MessageStream(queues=["a.1", "b"]).read(),
        ):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await wrong
            assert caught.value.code() is grpc.StatusCode.PERMISSION_DENIED


@pytest.mark.long_on_servers
@pytest.mark.parametrize("end", ["removed", "other queues"])
async def test_a_stream_ends_with_its_token(running: RunningServer, store: Transport, end: str) -> None:
    text, stored = new_token("t", [Role.CONSUME], ["q"])
    await store.access.add_token(stored)
    await store.access.add_token(new_token("other", [Role.READ], ["*"])[1])
    running.state.tokens.forget()
    (published,) = await store.publish([Message(queue="q", payload=b"1")])
    assert running.grpc_address is not None
    async with rpc_client(running.grpc_address, text) as client:
        call = client.MessageStream(queues=["q"], lease=3600)
        await received(call, 1)
        await store.access.remove_token("t")
        if end == "other queues":
            await store.access.add_token(msgspec.structs.replace(stored, queues=("r",)))
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call.read()
    expected = grpc.StatusCode.UNAUTHENTICATED if end == "removed" else grpc.StatusCode.PERMISSION_DENIED
    assert caught.value.code() is expected

    async def is_back() -> bool:
        (row,) = await store.operations.find([published.id])
        return row.state is State.PENDING

    await until(is_back)


@pytest.mark.long_on_servers
async def test_the_end_of_the_last_token_opens_nothing(running: RunningServer, store: Transport) -> None:
    assert running.grpc_address is not None
    async with rpc_client(running.grpc_address) as client:
        await client.publish("q", b"1")
        await store.access.add_token(new_token("t", list(Role), ["*"], expires_us=1)[1])
        running.state.tokens.forget()
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await client.publish("q", b"1")
        assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED


@pytest.mark.long_on_servers
async def test_a_caller_behind_a_proxy_needs_a_token(client: RpcClient) -> None:
    client._metadata = (("x-forwarded-for", "10.0.0.1"),)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await client.publish("q", b"1")
    assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED


async def test_texts_of_the_database_stay_in_the_log(
    client: RpcClient, running: RunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fail(*args: Any) -> Any:
        raise millpond.errors.StoreUnavailable("no connection to anna@db.internal/shop")

    monkeypatch.setattr(running.state.transport, "publish", fail)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await client.publish("q", b"1")
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE and "db.internal" not in str(caught.value.details())


@pytest.mark.parametrize(
    ("method", "fields"),
    [
        ("Publish", {"queue": ""}),
        ("Publish", {"queue": "x" * 256}),
        ("Publish", {"queue": "q", "messages": [NEW(body=b"no json")]}),
        ("Publish", {"queue": "q", "messages": [NEW(body=b"1", content_type="image/png")]}),
        ("Publish", {"queue": "q", "messages": [NEW(body=b"1", id="no uuid")]}),
        ("Publish", {"queue": "q", "messages": [NEW(body=b"1", priority=101)]}),
        ("Publish", {"queue": "q", "messages": [NEW(body=b"1", delay=float("nan"))]}),
        ("Publish", {"queue": "q", "messages": [NEW(body=b"1", due_at=wire.Timestamp(seconds=2**62))]}),
        ("MessageAck", {"receipts": ["x"]}),
        ("MessageAck", {"ids": [str(uuid4())]}),
        ("MessageAck", {"queue": "q", "ids": ["x"]}),
        ("MessageExtend", {"lease": -1.0}),
        ("MessageNack", {"receipts": ["\x00"]}),
    ],
)
async def test_wrong_values_are_invalid_arguments(method: str, fields: dict[str, Any]) -> None:
    transport = await millpond.connect("memory://")
    async with serving(transport, ServerSettings(port=0, grpc_port=0)) as running:
        assert running.grpc_address is not None
        async with rpc_client(running.grpc_address) as client:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await getattr(client, method)(**fields)
            assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT, caught.value
    await transport.close()


async def test_streams_without_presence_and_limits() -> None:
    transport = await millpond.connect("memory://")
    settings = ServerSettings(port=0, grpc_port=0, limits=Limits(connections=1))
    async with serving(transport, settings) as running:
        assert running.grpc_address is not None
        async with rpc_client(running.grpc_address) as client:
            await client.publish("q", b"1")
            call = client.MessageStream(queues=["q"])
            (message,) = await received(call, 1)
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await client.MessageAck(receipts=[message.receipt])
            assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
            call.cancel()
            await until(lambda: not running.state.connections.taken)
            for queues in ([], [""], ["q"] * 200):
                if queues != ["q"] * 200:
                    with pytest.raises(grpc.aio.AioRpcError) as caught:
                        await client.MessageStream(queues=queues).read()
                    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
                    await until(lambda: not running.state.connections.taken)
    await transport.close()


async def test_health_and_reflection_answer(client: RpcClient) -> None:
    from grpc_health.v1 import health_pb2
    from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

    check = client._channel.unary_unary(
        "/grpc.health.v1.Health/Check",
        request_serializer=health_pb2.HealthCheckRequest.SerializeToString,
        response_deserializer=health_pb2.HealthCheckResponse.FromString,
    )
    assert (await check(health_pb2.HealthCheckRequest(service=wire.SERVICE))).status == 1
    stub = reflection_pb2_grpc.ServerReflectionStub(client._channel)
    asked = [reflection_pb2.ServerReflectionRequest(list_services="")]
    async for reply in stub.ServerReflectionInfo(iter(asked)):
        assert wire.SERVICE in {service.name for service in reply.list_services_response.service}


def test_the_compiled_description_is_that_of_the_proto(tmp_path: Path) -> None:
    made = tmp_path / "made.binpb"
    known = resources.files("grpc_tools") / "_proto"
    assert protoc.main(["", f"-I{FOLDER}", f"-I{known}", f"--descriptor_set_out={made}", "millpond.proto"]) == 0
    assert made.read_bytes() == (FOLDER / "millpond.binpb").read_bytes()


async def test_a_database_that_fails_for_a_moment_keeps_no_message_for_ever(
    client: RpcClient, running: RunningServer, store: Transport, monkeypatch: pytest.MonkeyPatch
) -> None:
    (id_,) = await client.publish("q", b"1")
    call = client.MessageStream(queues=["q"])
    await received(call, 1)
    assert running.rpc is not None
    settle = running.state.transport.settle
    failed = asyncio.Event()

    async def fail(*args: Any, **options: Any) -> Any:
        failed.set()
        raise millpond.errors.StoreUnavailable("cut")

    monkeypatch.setattr(running.state.transport, "settle", fail)
    call.cancel()
    await failed.wait()
    monkeypatch.setattr(running.state.transport, "settle", settle)

    async def is_back() -> bool:
        (row,) = await store.operations.find([id_])  # type: ignore[list-item]
        return row.state is State.PENDING

    await until(is_back)
    assert streams_module.BEAT_EVERY < 1
