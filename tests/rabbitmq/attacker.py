"""A publisher that sends any bytes: AMQP frames written by hand over the driver's own connection."""

from __future__ import annotations

import struct
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

import aiormq
import pamqp.frame
from aiormq.abc import ChannelFrame
from pamqp.commands import Basic

HEADERS, MESSAGE_ID, CONTENT_TYPE, TIMESTAMP, USER_ID = 1 << 13, 1 << 7, 1 << 15, 1 << 6, 1 << 4
EXPIRATION = 1 << 8


class Attacker:
    def __init__(self, channel: Any) -> None:
        self.channel = channel

    async def send(self, properties: bytes, body: bytes = b"hostile", *, queue: str = "q", exchange: str = "") -> None:
        """Publish a message with these bytes as its properties."""
        number = self.channel.number
        header = struct.pack(">HHQ", 60, 0, len(body)) + properties
        frames = [pamqp.frame.marshal(Basic.Publish(exchange=exchange, routing_key=queue), number)]
        frames.append(struct.pack(">BHI", 2, number, len(header)) + header + b"\xce")
        if body:
            frames.append(struct.pack(">BHI", 3, number, len(body)) + body + b"\xce")
        await self.channel.write_queue.put(ChannelFrame(b"".join(frames), should_close=False, drain_future=None))

    async def flush(self) -> None:
        """Return when the broker has read everything."""
        await self.channel.basic_qos(prefetch_count=1)

    async def publish(
        self, headers: Mapping[str, Any] | None, body: bytes = b"hostile", *, to: str = "q", **properties: Any
    ) -> None:
        """Publish a message that the driver can encode."""
        await self.channel.basic_publish(
            body, routing_key=to, properties=Basic.Properties(headers=headers, **properties), wait=False
        )


@asynccontextmanager
async def attacker(url: str) -> AsyncIterator[Attacker]:
    connection = await aiormq.connect(url)
    try:
        yield Attacker(await connection.channel(publisher_confirms=False))
    finally:
        await connection.close()


def table(encoded: bytes) -> bytes:
    """Properties with these headers only."""
    return struct.pack(">HI", HEADERS, len(encoded)) + encoded


def nested(depth: int, kind: bytes = b"A") -> bytes:
    value = b"t\x01"
    for _ in range(depth):
        inner = value if kind == b"A" else b"\x01a" + value
        value = kind + struct.pack(">I", len(inner)) + inner
    return table(b"\x01a" + value)


UNDECODABLE = {
    "message_id in Latin-1": struct.pack(">H", MESSAGE_ID) + b"\x05caf\xe9s",
    "content_type in Latin-1": struct.pack(">H", CONTENT_TYPE) + b"\x05caf\xe9s",
    "timestamp out of range": struct.pack(">HQ", TIMESTAMP, 2**63),
    "header timestamp out of range": table(b"\x01tT" + struct.pack(">Q", 2**63)),
    "header name in Latin-1": table(b"\x02\xe9\xe9t\x01"),
    "arrays 3000 deep": nested(3000),
    "tables 3000 deep": nested(3000, b"F"),
}

_TEXT = b"S\0\0\0\x01x"
FORGED_DEATHS = {
    "x-death": b"\x07x-deathA" + struct.pack(">I", len(_TEXT)) + _TEXT,
    "a second BCC": b"\x03BCCA\0\0\0\0\x03BCC" + _TEXT,
}
"""Headers that RabbitMQ 3.10 reads when it moves a dead letter. It does not survive that."""

METADATA = {
    "headers is a list": '{"queue":"q","headers":"[1]"}',
    "headers is no JSON": '{"queue":"q","headers":"{bad"}',
    "headers is deep": '{"queue":"q","headers":"{\\"a\\":' + "[" * 20000 + "]" * 20000 + '}"}',
    "headers is 65 deep": '{"queue":"q","headers":"{\\"a\\":' + "[" * 64 + "]" * 64 + '}"}',
    "headers is 980 deep": '{"queue":"q","headers":"{\\"a\\":' + "[" * 979 + "]" * 979 + '}"}',
    "headers has an integer of 5000 digits": '{"queue":"q","headers":"{\\"a\\":1' + "0" * 5000 + '}"}',
    "unknown field is deep": '{"queue":"q","x":' + "[" * 50000 + "]" * 50000 + "}",
    "created_us is huge": '{"queue":"q","created_us":9223372036854775808}',
    "due_us is huge": '{"queue":"q","due_us":9000000000000000000,"wait_us":9000000000000000000}',
    "attempts are negative": '{"queue":"q","attempts":-1000000}',
    "deliveries are huge": '{"queue":"q","deliveries":99999999999999999999}',
    "the key is long": '{"queue":"q","key":"' + "k" * 5000 + '"}',
    "the key has NUL": '{"queue":"q","key":"\\u0000"}',
    "the error has NUL": '{"queue":"q","error":"\\u0000"}',
    "the priority is 5000": '{"queue":"q","priority":5000}',
    "a list": "[]",
}
