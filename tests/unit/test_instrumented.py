"""A transport with telemetry has the rooms of the one inside it."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest

import millpond
from millpond import Capability
from millpond.errors import Unsupported
from millpond.telemetry import Telemetry

ROOMS = {
    "streams": Capability.STREAM_STATUS,
    "bulk": Capability.BULK,
    "exports": Capability.EXPORTS,
    "transactions": Capability.TRANSACTIONS,
}


@pytest.mark.parametrize("room", ROOMS)
@pytest.mark.parametrize("has_rooms", [True, False], ids=["sqlite", "memory"])
async def test_it_has_the_same_rooms(tmp_path: Path, room: str, has_rooms: bool) -> None:
    url = f"sqlite:///{tmp_path / 'shop.db'}" if has_rooms else "memory://"
    options = {"migrate": True} if has_rooms else {}
    transport = copy.copy(await millpond.connect(url, telemetry=Telemetry(), **options))
    assert (ROOMS[room] in transport.capabilities) is has_rooms
    if has_rooms:
        assert getattr(transport, room) is not None
    else:
        with pytest.raises(Unsupported, match=ROOMS[room].name or ""):
            getattr(transport, room)
    assert await transport.workers.reap() == 0
    for both in ("operations", "periodic", "access", "diagnosis"):
        assert getattr(transport, both) is not None
    await transport.close()
