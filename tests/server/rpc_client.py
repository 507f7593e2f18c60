"""A gRPC client, made from the description as a client in another language is."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc

from millpond.server.rpc import wire


class RpcClient:
    """`await client.Publish(queue="q", messages=[…])`; `client.MessageStream(…)` is a call to iterate over."""

    def __init__(self, channel: grpc.aio.Channel, token: str | None = None) -> None:
        self._channel = channel
        self._metadata: tuple[tuple[str, str], ...] = (("authorization", f"Bearer {token}"),) if token else ()

    def __getattr__(self, name: str) -> Any:
        request, reply, many = wire.methods()[name]
        make = self._channel.unary_stream if many else self._channel.unary_unary
        call = make(
            f"/{wire.SERVICE}/{name}",
            request_serializer=request.SerializeToString,
            response_deserializer=reply.FromString,
        )
        return lambda **fields: call(request(**fields), metadata=self._metadata, timeout=None if many else 60)

    async def publish(self, queue: str, *bodies: bytes) -> list[str]:
        new = wire.message("NewMessage")
        reply = await self.Publish(queue=queue, messages=[new(body=body) for body in bodies])
        return [published.id for published in reply.published]


@asynccontextmanager
async def rpc_client(address: str, token: str | None = None) -> AsyncIterator[RpcClient]:
    async with grpc.aio.insecure_channel(address, options=[("grpc.use_local_subchannel_pool", 1)]) as channel:
        yield RpcClient(channel, token)


async def received(call: Any, number: int) -> list[Any]:
    """The next messages of a stream."""
    found: list[Any] = []
    while len(found) < number:
        found += (await call.read()).messages
    return found
