"""A transport has each room, or raises `Unsupported` with the name of the capability it lacks."""

from __future__ import annotations

import pytest

from millpond import Capability, Transport
from millpond.errors import Unsupported

ROOMS = {
    "periodic": Capability.PERIODIC,
    "streams": Capability.STREAM_STATUS,
    "bulk": Capability.BULK,
    "exports": Capability.EXPORTS,
    "access": Capability.ACCESS,
    "diagnosis": Capability.BROWSE,
    "transactions": Capability.TRANSACTIONS,
}


async def test_a_room_is_there_or_its_capability_is_named(transport: Transport) -> None:
    for room, capability in ROOMS.items():
        if capability in transport.capabilities:
            assert getattr(transport, room) is getattr(transport, room), room
        else:
            with pytest.raises(Unsupported, match=capability.name or ""):
                getattr(transport, room)


async def test_every_transport_has_operations_and_workers(transport: Transport) -> None:
    assert transport.operations is transport.operations
    assert transport.workers is transport.workers
