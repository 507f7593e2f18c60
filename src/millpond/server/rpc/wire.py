"""The messages of `millpond.proto`, as classes.

They are made from the compiled description, `millpond.binpb`. Generated code would work only with the versions of
protobuf that follow the compiler's.
"""

from __future__ import annotations

from importlib import resources
from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory, timestamp_pb2

SERVICE = "millpond.v1.Millpond"
_POOL: Any = descriptor_pool.Default()


def _load() -> Any:
    assert timestamp_pb2.DESCRIPTOR is not None  # part of the pool from now on
    described = descriptor_pb2.FileDescriptorSet()
    described.ParseFromString((resources.files("millpond.server.rpc") / "millpond.binpb").read_bytes())
    for file in described.file:
        _POOL.Add(file)
    return _POOL.FindFileByName("millpond.proto")


_FILE = _load()
_CLASSES = {name: message_factory.GetMessageClass(kind) for name, kind in _FILE.message_types_by_name.items()}


def message(name: str) -> Any:
    """The class of a message."""
    return _CLASSES[name]


def methods() -> dict[str, tuple[Any, Any, bool]]:
    """Method -> class of its request, class of its reply, and whether it sends many replies."""
    service = _FILE.services_by_name["Millpond"]
    return {
        method.name: (message(method.input_type.name), message(method.output_type.name), method.server_streaming)
        for method in service.methods
    }


Delivery, MessageStreamResponse, Published, PublishResponse, SettleResponse, Timestamp = (
    *map(message, ("Delivery", "MessageStreamResponse", "Published", "PublishResponse", "SettleResponse")),
    timestamp_pb2.Timestamp,
)
