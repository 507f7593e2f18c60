"""Handlers of Django's tests take turns with the connections of the test."""

import asyncio
import threading

import pytest

from millpond.integrations.django import connections_in_tests
from tests.waiting import until


async def test_a_cancelled_handler_that_waited_leaves_the_turn_to_others(monkeypatch: pytest.MonkeyPatch) -> None:
    turn = Turn()
    monkeypatch.setattr(connections_in_tests, "_turn", turn)
    turn.acquire()

    async def handler() -> None:
        async with connections_in_tests.turn_in_loop():
            pass

    waiting = asyncio.create_task(handler())
    await until(lambda: turn.waited_for == 2)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    turn.release()
    await until(lambda: turn.released == 2)
    assert not turn.lock.locked()


class Turn:
    """A lock that counts its calls."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.waited_for = self.released = 0

    def acquire(self) -> bool:
        self.waited_for += 1
        return self.lock.acquire()

    def release(self) -> None:
        self.lock.release()
        self.released += 1
