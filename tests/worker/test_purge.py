"""A worker purges the archive periodically, by the retention of each queue."""

import logging
from collections.abc import Callable
from typing import Any

import pytest

from millpond import Millpond, State
from millpond.errors import StoreBusy
from millpond.worker import chores
from tests.waiting import until
from tests.worker.conftest import counts, working


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chores, "FIRST_PURGE", 0.02)
    monkeypatch.setattr(chores, "PURGE_EVERY", 0.02)


async def test_messages_beyond_their_retention_are_purged(pond: Millpond) -> None:
    handled = []

    @pond.subscriber("q", "kept")
    async def handle(body: int) -> None:
        handled.append(body)

    transport = await pond.transport
    await transport.operations.retain("q", completed=0, failed=None)
    await pond.publish("q", 1)
    await pond.publish("kept", 2)
    async with working(pond):
        await until(lambda: sorted(handled) == [1, 2])

        async def gone() -> bool:
            return await counts(pond) == {} and await counts(pond, "kept") == {State.COMPLETED: 1}

        await until(gone)


async def test_a_purge_that_fails_stops_nothing(
    make_pond: Callable[..., Millpond], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    pond = make_pond()
    pond.subscriber("q")(lambda body: None)
    errors = [StoreBusy("locks"), RuntimeError("anything")]

    async def fail(*_: Any, **__: Any) -> int:
        if errors:
            raise errors.pop(0)
        return 3

    monkeypatch.setattr((await pond.transport).operations, "purge", fail)

    def logged() -> list[str]:
        return [record.getMessage() for record in caplog.records]

    with caplog.at_level(logging.INFO, "millpond.worker"):
        async with working(pond):
            await until(lambda: "purged: 3 messages of the archive" in logged())
    assert "purge failed, tried again later: locks" in logged() and "purge failed, tried again later" in logged()
