"""A gRPC client, made from the description of the interface."""

from typing import Any

import grpc

from millpond.server.rpc import wire


class RpcClient:
    """The calls of one client, on a connection that no other client shares."""

    def __init__(self, address: str) -> None:
        self._channel = grpc.aio.insecure_channel(address, options=[("grpc.use_local_subchannel_pool", 1)])
        made: dict[str, Any] = {}
        for name, (request, reply, many) in wire.methods().items():
            make = self._channel.unary_stream if many else self._channel.unary_unary
            made[name] = make(
                f"/{wire.SERVICE}/{name}",
                request_serializer=request.SerializeToString,
                response_deserializer=reply.FromString,
            )
        self._calls = made
        self._requests = {name: request for name, (request, _, _) in wire.methods().items()}

    def stream(self, queue: str, most: int) -> Any:
        """Replies with messages of a queue; at most this many are unsettled."""
        request = self._requests["MessageStream"](queues=[queue], max_messages=most)
        return self._calls["MessageStream"](request)

    async def ack(self, receipts: list[str]) -> int:
        """Ack messages; returns the number of refused ones."""
        reply = await self._calls["MessageAck"](self._requests["MessageAck"](receipts=receipts))
        return len(reply.refused)

    async def close(self) -> None:
        await self._channel.close()
