"""A worker purges the archive now and then, by what each queue keeps."""

import logging
from collections.abc import Callable
from typing import Any, cast

import pytest

from millpond import Millpond, State, Store
from millpond.errors import StoreBusy
from millpond.worker import purge
from tests.waiting import until
from tests.worker.conftest import counts, working


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(purge, "FIRST", 0.02)
    monkeypatch.setattr(purge, "EVERY", 0.02)


async def test_what_retention_no_longer_keeps_goes(pond: Millpond) -> None:
    handled = []

    @pond.subscriber("q", "kept")
    async def handle(body: int) -> None:
        handled.append(body)

    store = cast(Store, await pond.transport)
    await store.retain("q", completed=0, failed=None)
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

    transport: Any = await pond.transport
    monkeypatch.setattr(transport, "purge", fail, raising=False)

    def said() -> list[str]:
        return [record.getMessage() for record in caplog.records]

    with caplog.at_level(logging.INFO, "millpond.worker"):
        async with working(pond):
            await until(lambda: "3 messages were purged from the archive" in said())
    assert "cannot purge now: locks" in said() and "cannot purge now" in said()
