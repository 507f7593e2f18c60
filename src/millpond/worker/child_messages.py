"""Messages between a worker and a child process that runs its suspects.

On the socket each is MessagePack. An object of a known class is an extension value with its name and fields.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from datetime import timedelta
from typing import Any, BinaryIO, get_args
from uuid import UUID

import msgspec

from millpond.message import Claim, Message, Receipt
from millpond.outcome import Outcome
from millpond.telemetry import Event

_SIZE = 4
"""Number of bytes before each message that have its size."""

# --- from the worker to the child -------------------------------------------------------------------


class Run(msgspec.Struct, frozen=True):
    """Run the handler of this message."""

    claim: Claim


class WriteAnswer(msgspec.Struct, frozen=True):
    """Answer to `Write`."""

    ours: bool
    """False: the receipt was stale."""


class ReceiptStale(msgspec.Struct, frozen=True):
    """The receipt of the message is stale."""

    receipt: Receipt


class Interrupt(msgspec.Struct, frozen=True):
    """Interrupt the handler: the worker stops."""


# --- from the child to the worker -------------------------------------------------------------------


class Idle(msgspec.Struct, frozen=True):
    """No handler runs in the child: it is ready for the next message."""


class Started(msgspec.Struct, frozen=True):
    """The child has received the message, and begins to run it. A death before that is not the message's fault."""


class Settle(msgspec.Struct, frozen=True):
    """Write the outcome of the handler."""

    outcome: Outcome
    decided_in_transaction: bool
    """Write it only if the handler's own transaction was not committed."""


class Write(msgspec.Struct, frozen=True):
    """Write the decision of a handler that waits until it is durable."""

    outcome: Outcome


class Lost(msgspec.Struct, frozen=True):
    """The handler lost its lease. `announced`: an event was emitted already."""

    receipt: Receipt
    announced: bool


class Announce(msgspec.Struct, frozen=True):
    """An event of telemetry: its subscribers are in the worker."""

    event: Event


class StopWorker(msgspec.Struct, frozen=True):
    """The handler called `pond.stop()`."""


ToChild = Run | WriteAnswer | ReceiptStale | Interrupt
ToWorker = Idle | Started | Settle | Write | Lost | Announce | StopWorker


# --- on the socket ----------------------------------------------------------------------------------


_CLASSES: dict[str, type[msgspec.Struct]] = {
    kind.__name__: kind
    for kind in (*get_args(ToChild), *get_args(ToWorker), *get_args(Outcome), *get_args(Event), Claim, Message, Receipt)
}
_OBJECT, _ID, _DURATION, _TUPLE, _HEADER = 1, 2, 3, 4, 5
"""Codes of extension values."""


def pack(message: ToChild | ToWorker) -> bytes:
    body = msgspec.msgpack.encode(_plain(message))
    return len(body).to_bytes(_SIZE, "big") + body


def _plain(value: Any) -> Any:
    match value:
        case msgspec.Struct():
            fields = {name: _plain(getattr(value, name)) for name in value.__struct_fields__}
            return msgspec.msgpack.Ext(_OBJECT, msgspec.msgpack.encode([type(value).__name__, fields]))
        case UUID():
            return msgspec.msgpack.Ext(_ID, value.bytes)
        case timedelta():
            return msgspec.msgpack.Ext(_DURATION, msgspec.msgpack.encode(value.total_seconds()))
        case tuple():
            return msgspec.msgpack.Ext(_TUPLE, msgspec.msgpack.encode([_plain(item) for item in value]))
        case Mapping():
            return {name: _header(item) for name, item in value.items()}
        case str() if not value.isascii():  # half of a surrogate pair cannot be encoded
            return value.encode(errors="replace").decode()
        case _:
            return value


def _header(value: Any) -> Any:
    """A header as it is. One with an integer of more than 64 bits, which MessagePack lacks, travels as JSON."""
    try:
        msgspec.msgpack.encode(value)
    except OverflowError:
        return msgspec.msgpack.Ext(_HEADER, msgspec.json.encode(value))
    return value


async def receive(reader: asyncio.StreamReader) -> ToWorker | None:
    """The next message from the child; None if there is no further one."""
    try:
        size = int.from_bytes(await reader.readexactly(_SIZE), "big")
        message: ToWorker = _unpack(await reader.readexactly(size))
    except (asyncio.IncompleteReadError, ConnectionError):
        return None
    return message


def read(file: BinaryIO) -> ToChild | None:
    """The next message from the worker; None if there is no further one. It blocks."""
    try:
        head = file.read(_SIZE)
        size = int.from_bytes(head, "big")
        body = file.read(size)
    except ConnectionError:
        return None
    return _unpack(body) if len(head) == _SIZE and len(body) == size else None


def _unpack(body: bytes) -> Any:
    return _DECODER.decode(body)


def _extension(code: int, data: memoryview) -> Any:
    if code == _ID:
        return UUID(bytes=bytes(data))
    if code == _DURATION:
        return timedelta(seconds=msgspec.msgpack.decode(data, type=float))
    if code == _TUPLE:
        return tuple(_DECODER.decode(data))
    if code == _HEADER:
        return msgspec.json.decode(data)
    name, fields = _DECODER.decode(data)
    return _CLASSES[name](**fields)


_DECODER = msgspec.msgpack.Decoder(ext_hook=_extension)
