"""Imitations of RabbitMQ 4.3 on the broker at hand, which is older: by its documents, not by a run."""

from __future__ import annotations

import struct

import pytest

from millpond.transports.rabbitmq import broker_connection, frames
from millpond.transports.rabbitmq.frames import Delivered
from millpond.transports.rabbitmq.properties import decode, encode


def imitate_version(monkeypatch: pytest.MonkeyPatch, *version: int) -> None:
    """The broker reports this version. Its behaviour stays the same."""
    monkeypatch.setattr(broker_connection, "version_of", lambda properties: version)


def imitate_counters(monkeypatch: pytest.MonkeyPatch) -> None:
    """Redeliveries have the two counters of 4.3.

    `x-acquired-count` has all deliveries before. `x-delivery-count` has fewer, because nacks, timeouts and partitions
    do not count there; the imitation leaves out as many as it can.
    """
    imitate_version(monkeypatch, 4, 3)
    original = frames._delivered

    def delivered(consumer_tag: str, method: bytes, at: int, properties: bytes, body: bytes) -> Delivered:
        message = original(consumer_tag, method, at, properties, body)
        try:
            found = decode(properties)
        except ValueError:
            return message
        count = found.headers.get("x-delivery-count")
        if not message.redelivered or not isinstance(count, int):
            return message
        headers = {**found.headers, "x-acquired-count": count, "x-delivery-count": min(count, 1)}
        changed = encode(found.message_id or "", headers, found.others)
        return Delivered(message.consumer_tag, message.tag, message.redelivered, changed, body)

    monkeypatch.setattr(frames, "_delivered", delivered)


def cancel_frame(channel: int, consumer_tag: str) -> bytes:
    """Frame with which 4.3 cancels a consumer that held a message for too long. Its channel stays open."""
    payload = struct.pack(">HHB", 60, 30, len(consumer_tag)) + consumer_tag.encode() + b"\x01"
    return struct.pack(">BHI", 1, channel, len(payload)) + payload + b"\xce"
