"""Between the socket and the driver: messages of the broker are taken out before the driver reads them.

The driver decodes every message in its reader, and ends the connection if it cannot. So it never sees a
message: each complete one goes to its channel as bytes, and `properties.py` decodes them. The driver gets all other
frames. The only hook is the `transport_factory` of its public constructor.
"""

from __future__ import annotations

import asyncio
import logging
import struct
from collections.abc import Callable
from typing import Any, Protocol

import msgspec
from aiormq.connection import TransportFactory

from millpond.transports.rabbitmq.properties import decode

log = logging.getLogger("millpond.rabbitmq")

_METHOD, _HEADER, _BODY = 1, 2, 3
_END = 0xCE
_FRAME = struct.Struct(">BHI")
_INDEX = struct.Struct(">I")
_TAG = struct.Struct(">Q")
_SIZE = struct.Struct(">HHQ")


def _index(class_id: int, method_id: int) -> int:
    return class_id << 16 | method_id


_DELIVER, _GET_OK, _RETURN = _index(60, 60), _index(60, 71), _index(60, 50)
_CHANNEL_CLOSE, _CHANNEL_CLOSE_OK = _index(20, 40), _index(20, 41)
_CONNECTION_CLOSE, _BLOCKED, _UNBLOCKED = _index(10, 50), _index(10, 60), _index(10, 61)
_CONTENT = {_DELIVER, _GET_OK, _RETURN}
_HEARTBEAT = _FRAME.pack(8, 0, 0) + bytes([_END])
_ALIVE_EVERY = 1.0
"""Seconds between heartbeats for the driver while only messages arrive, which it does not see."""
_NO_CONTENT = struct.pack(">HHQH", 60, 0, 0, 0)
_MESSAGE_ID = 1 << 7


_USUAL_PROPERTIES = 1024
_DECODED = 16
"""Bytes of memory for each byte of many small headers. Measured: 15."""


class Delivered(msgspec.Struct, frozen=True, gc=False):
    """A message as it came. `properties` are the publisher's bytes: flags, then values."""

    consumer_tag: str
    tag: int
    redelivered: bool
    properties: bytes
    body: bytes

    @property
    def size(self) -> int:
        """Estimated bytes of memory that it takes when it is decoded."""
        return len(self.body) + _DECODED * max(len(self.properties) - _USUAL_PROPERTIES, 0)

    @property
    def broker_may_move(self) -> bool:
        """False: the process that moves dead letters on RabbitMQ before 4.0 may read a forged header, and die."""
        return b"x-death" not in self.properties and b"BCC" not in self.properties


class Receiver(Protocol):
    """A channel. None of the calls waits."""

    def on_delivered(self, message: Delivered) -> None: ...
    def on_got(self, message: Delivered) -> None: ...


class _Incoming:
    """A message of which frames are missing."""

    __slots__ = ("body", "index", "left", "method", "properties")

    def __init__(self, index: int, method: bytes) -> None:
        self.index = index
        self.method = method
        self.properties: bytes | None = None
        self.body: list[bytes] = []
        self.left = 0


class ContentReader(asyncio.StreamReader):
    """The driver's stream, without messages."""

    def __init__(self, on_blocked: Callable[[str | None], None]) -> None:
        super().__init__()
        self.receivers: dict[int, Receiver] = {}
        """By the number of the channel."""
        self.blocked = False
        """True while the broker does not read from this connection."""
        self.close_reason: tuple[int, str] | None = None
        """Code and text with which the broker closed the connection."""
        self.started = False
        self._on_blocked = on_blocked
        self._rest = b""
        self._raw = False
        self._incoming: dict[int, _Incoming] = {}
        self._passed_at = 0.0

    def feed_data(self, data: Any) -> None:
        data = bytes(data)
        if not self.started:
            self.started = True
            self._raw = data.startswith(b"AMQP")  # the broker has another version and sends its number
        if self._rest:
            data, self._rest = self._rest + data, b""
        passed = data if self._raw else self._read_frames(data)
        if passed:
            super().feed_data(passed)

    def _read_frames(self, data: bytes) -> bytes:
        """Read the complete frames. Return those of the driver."""
        at, size = 0, len(data)
        passed: list[bytes] = []
        swallowed = False
        while size - at >= _FRAME.size:
            kind, channel, length = _FRAME.unpack_from(data, at)
            end = at + _FRAME.size + length + 1
            if end > size:
                break
            if data[end - 1] != _END:  # no frame: the driver reports it
                self._raw = True
                passed.append(data[at:])
                at = size
                break
            payload = data[at + _FRAME.size : end - 1]
            frame: bytes | None
            if kind == _METHOD and length >= _INDEX.size:
                frame = self._method(channel, payload, data[at:end])
            elif channel in self._incoming and kind in (_HEADER, _BODY):
                frame = self._content(channel, kind, payload)
            else:
                frame = data[at:end]
            if frame is None:
                swallowed = True
            else:
                passed.append(frame)
            at = end
        self._rest = data[at:]
        if passed or swallowed:
            now = asyncio.get_running_loop().time()
            if passed:
                self._passed_at = now
            elif now - self._passed_at > _ALIVE_EVERY:
                self._passed_at = now
                return _HEARTBEAT
        return b"".join(passed)

    def _method(self, channel: int, payload: bytes, frame: bytes) -> bytes | None:
        (index,) = _INDEX.unpack_from(payload)
        if index in _CONTENT:
            self._incoming[channel] = _Incoming(index, payload)
            return None
        if index in (_CHANNEL_CLOSE, _CHANNEL_CLOSE_OK):
            self._incoming.pop(channel, None)
        if index in (_CHANNEL_CLOSE, _CONNECTION_CLOSE):
            return self._close(channel, index, payload)
        if index == _BLOCKED:
            self.blocked = True
            self._on_blocked(_short_text(payload, 4)[0].decode(errors="replace"))
        elif index == _UNBLOCKED:
            self.blocked = False
            self._on_blocked(None)
        return frame

    def _close(self, channel: int, index: int, payload: bytes) -> bytes:
        """The reason may end within a character."""
        (code,) = struct.unpack_from(">H", payload, 4)
        text, rest = _short_text(payload, 6)
        if index == _CONNECTION_CLOSE:
            self.close_reason = code, text.decode(errors="replace")
        return _method_frame(channel, payload[:6] + _as_short(_ascii(text)) + payload[rest:])

    def _content(self, channel: int, kind: int, payload: bytes) -> bytes | None:
        incoming = self._incoming[channel]
        if kind == _HEADER:
            _, _, incoming.left = _SIZE.unpack_from(payload)
            incoming.properties = payload[_SIZE.size :]
        else:
            incoming.left -= len(payload)
            incoming.body.append(payload)
        if incoming.properties is None or incoming.left > 0:
            return None
        del self._incoming[channel]
        return self._complete(channel, incoming, incoming.properties)

    def _complete(self, channel: int, incoming: _Incoming, properties: bytes) -> bytes | None:
        method, body = incoming.method, incoming.body[0] if len(incoming.body) == 1 else b"".join(incoming.body)
        receiver = self.receivers.get(channel)
        if incoming.index == _DELIVER:
            consumer_tag, at = _short_text(method, 4)
            if receiver is not None:
                receiver.on_delivered(_delivered(consumer_tag.decode(errors="replace"), method, at, properties, body))
            return None
        if incoming.index == _GET_OK:
            if receiver is not None:
                receiver.on_got(_delivered("", method, 4, properties, body))
            # The driver gets the answer without exchange, routing key and content.
            return _method_frame(channel, method[:13] + b"\0\0" + method[-4:]) + _header_frame(channel, _NO_CONTENT)
        # Our own publish that no queue took. The driver recognises it by its id, which we chose.
        returned = _method_frame(channel, method[:6] + b"\0\0\0")
        return returned + _header_frame(channel, struct.pack(">HHQH", 60, 0, 0, _MESSAGE_ID) + own_id(properties))


def _delivered(consumer_tag: str, method: bytes, at: int, properties: bytes, body: bytes) -> Delivered:
    (tag,) = _TAG.unpack_from(method, at)
    return Delivered(consumer_tag, tag, bool(method[at + 8] & 1), properties, body)


def own_id(properties: bytes) -> bytes:
    """The message id, with its length, of a message that we published."""
    message_id = decode(properties).message_id or ""
    return _as_short(message_id.encode())


def _short_text(payload: bytes, at: int) -> tuple[bytes, int]:
    """(a text of up to 255 bytes, position after it)"""
    end = at + 1 + payload[at]
    return payload[at + 1 : end], end


def _as_short(text: bytes) -> bytes:
    return bytes([len(text)]) + text


def _ascii(text: bytes) -> bytes:
    return text if text.isascii() else bytes(octet if octet < 128 else 63 for octet in text)


def _method_frame(channel: int, payload: bytes) -> bytes:
    return _FRAME.pack(_METHOD, channel, len(payload)) + payload + bytes([_END])


def _header_frame(channel: int, payload: bytes) -> bytes:
    return _FRAME.pack(_HEADER, channel, len(payload)) + payload + bytes([_END])


class ContentStreams(TransportFactory):
    """Opens the socket for the driver, with a `ContentReader`."""

    def __init__(self, reader: ContentReader) -> None:
        self._reader = reader

    async def create(self, url: Any, **options: Any) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        provider = options.pop("ssl_context_provider", None)
        context = await provider.get_context() if url.scheme == "amqps" else None
        loop = asyncio.get_running_loop()
        protocol = asyncio.StreamReaderProtocol(self._reader)
        transport, _ = await loop.create_connection(lambda: protocol, url.host, url.port, ssl=context, **options)
        return self._reader, asyncio.StreamWriter(transport, protocol, self._reader, loop)
