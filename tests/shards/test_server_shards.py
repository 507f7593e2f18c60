"""A server over shards: its receipts name the shard, and it settles and extends there."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest

import millpond
from millpond import State, Transport
from millpond.errors import ShardUnavailable
from millpond.server.receipts import parse_receipt, receipt_text
from millpond.server.run_server import RunningServer, serving
from millpond.server.settings import ServerSettings
from millpond.transports.sharded.store import ShardedStore
from tests.server.rpc_client import RpcClient, received, rpc_client
from tests.shards.conftest import NAMES, keys_of, message

pytestmark = pytest.mark.usefixtures("patient")


@pytest.fixture
async def running(urls: list[str]) -> AsyncIterator[RunningServer]:
    transport = await millpond.connect(urls)
    async with serving(transport, ServerSettings(port=0, grpc_port=0)) as running:
        yield running
    await transport.close()


@pytest.fixture
async def client(running: RunningServer) -> AsyncIterator[RpcClient]:
    assert running.grpc_address is not None
    async with rpc_client(running.grpc_address) as client:
        yield client


async def counted(store: Transport) -> Any:
    (stats,) = await store.operations.count(["q"])
    return stats.counts


async def test_acks_by_receipt_and_by_id_make_room_in_a_stream(client: RpcClient, store: ShardedStore) -> None:
    await store.publish([message(key) for name in NAMES for key in keys_of(store, name, 2)])
    call = client.MessageStream(queues=["q"], max_messages=1)
    for n in range(6):
        (one,) = await received(call, 1)
        named = {"receipts": [one.receipt]} if n % 2 else {"queue": "q", "ids": [one.id]}
        assert (await client.MessageAck(**named)).refused == []
    assert (await counted(store))[State.COMPLETED] == 6
    call.cancel()


async def test_an_extension_lasts_longer_than_the_lease(client: RpcClient, store: ShardedStore) -> None:
    await store.publish([message(key) for name in NAMES for key in keys_of(store, name, 1)])
    call = client.MessageStream(queues=["q"], lease=1)
    found = await received(call, 3)
    assert (await client.MessageExtend(receipts=[one.receipt for one in found], lease=600)).refused == []
    (lone,) = await store.publish([message(*keys_of(store, "b", 1))])
    (first,) = await received(call, 1)
    (again,) = await received(call, 1)  # its lease of a second ended, as those of the others would have
    assert first.id == again.id == str(lone.id)
    assert (await client.MessageAck(receipts=[one.receipt for one in [*found, again]])).refused == []
    call.cancel()


async def test_a_receipt_as_text_names_the_shard(store: ShardedStore) -> None:
    await store.publish([message(key) for name in NAMES for key in keys_of(store, name, 1)])
    claims = await store.claim(["q"], 3)
    assert [parse_receipt(receipt_text(claim)).receipt for claim in claims] == [claim.receipt for claim in claims]
    assert sorted(str(claim.receipt.shard) for claim in claims) == NAMES


async def test_receipts_without_a_shard_are_settled_while_another_shard_is_away(
    store: ShardedStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As another program may have kept them."""
    await store.publish([message(key) for name in NAMES for key in keys_of(store, name, 1)])
    claims = await store.claim(["q"], 3)
    bare = {str(c.receipt.shard): millpond.Receipt(c.receipt.id, c.receipt.token) for c in claims}
    monkeypatch.setattr(type(store.members["b"].breaker), "allows", lambda breaker: breaker is not broken)
    broken = store.members["b"].breaker
    assert await store.settle([millpond.Ack(bare["a"]), millpond.Ack(bare["c"])]) == []
    with pytest.raises(ShardUnavailable):  # it may be there
        await store.settle([millpond.Ack(bare["b"])])
    monkeypatch.undo()
    assert await store.settle([millpond.Ack(bare["b"])]) == []
    assert (await counted(store))[State.COMPLETED] == 3
