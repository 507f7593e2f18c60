"""SIGTERM and SIGINT stop workers, and the handlers of the surrounding program keep their signals."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from millpond.signals import stop_on_signals
from tests.waiting import until


@pytest.fixture(autouse=True)
def handlers_as_before() -> Iterator[None]:
    """Those of Python itself: PySpark, in an earlier test of this process, sets one for SIGINT."""
    found = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    before = {signal.SIGTERM: signal.SIG_DFL, signal.SIGINT: signal.default_int_handler}
    for number, handler in before.items():
        signal.signal(number, handler)
    yield
    after = {number: signal.getsignal(number) for number in before}
    for number, handler in found.items():
        signal.signal(number, handler)
    assert after == before, "the test has left a handler behind"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_a_signal_stops(number: signal.Signals) -> None:
    stopped = asyncio.Event()
    with stop_on_signals(stopped.set):
        os.kill(os.getpid(), number)
        async with asyncio.timeout(60):
            await stopped.wait()


async def test_a_blocked_event_loop_does_not_delay_a_thread() -> None:
    """A worker records at once that it stops."""
    at_once, stopped = threading.Event(), asyncio.Event()
    with stop_on_signals(stopped.set, at_once.set):
        threading.Timer(0.1, os.kill, [os.getpid(), signal.SIGTERM]).start()
        assert at_once.wait(60)  # blocks the event loop
        assert not stopped.is_set()
        async with asyncio.timeout(60):
            await stopped.wait()
    assert signal.set_wakeup_fd(-1) == -1


async def test_the_wake_up_socket_of_the_event_loop_still_works() -> None:
    calls: list[str] = []
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGUSR1, lambda: calls.append("program"))
    try:
        for _ in range(2):
            with stop_on_signals(lambda: calls.append("stop"), lambda: calls.append("at once")):
                os.kill(os.getpid(), signal.SIGUSR1)
                await until(lambda: "program" in calls)
        os.kill(os.getpid(), signal.SIGUSR1)
        await until(lambda: len(calls) == 3)
    finally:
        loop.remove_signal_handler(signal.SIGUSR1)
    assert calls == ["program"] * 3


async def test_several_stop_together_and_in_any_order() -> None:
    """Two ponds that run in one program: the first context ends before the second."""
    stops: list[str] = []
    first, second = (stop_on_signals(lambda name=name: stops.append(name)) for name in ("first", "second"))
    first.__enter__()
    second.__enter__()
    os.kill(os.getpid(), signal.SIGTERM)
    await until(lambda: stops == ["first", "second"])
    first.__exit__(None, None, None)
    os.kill(os.getpid(), signal.SIGTERM)
    await until(lambda: stops == ["first", "second", "second"])
    second.__exit__(None, None, None)


async def test_a_handler_of_the_program_keeps_its_signal() -> None:
    calls: list[str] = []
    before = signal.signal(signal.SIGTERM, lambda *_: calls.append("program"))
    try:
        with stop_on_signals(lambda: calls.append("stop")):
            os.kill(os.getpid(), signal.SIGTERM)
            await until(lambda: calls)
            os.kill(os.getpid(), signal.SIGINT)  # the program has no handler for this one
            await until(lambda: len(calls) == 2)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert calls == ["program", "stop"]


async def test_a_handler_of_the_event_loop_keeps_its_signal() -> None:
    calls: list[str] = []
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGTERM, lambda: calls.append("program"))
    try:
        with stop_on_signals(lambda: calls.append("stop")):
            os.kill(os.getpid(), signal.SIGTERM)
            await until(lambda: calls)
    finally:
        loop.remove_signal_handler(signal.SIGTERM)
    assert calls == ["program"]


async def test_a_command_replaces_handlers_of_libraries() -> None:
    calls: list[str] = []

    def library(*_: Any) -> None:
        calls.append("library")

    before = signal.signal(signal.SIGINT, library)
    try:
        with stop_on_signals(lambda: calls.append("stop"), replace=True):
            os.kill(os.getpid(), signal.SIGINT)
            await until(lambda: calls)
        assert signal.getsignal(signal.SIGINT) is library
    finally:
        signal.signal(signal.SIGINT, before)
    assert calls == ["stop"]


async def test_a_handler_that_is_set_meanwhile_stays() -> None:
    before = signal.getsignal(signal.SIGTERM)

    def later(*_: Any) -> None: ...

    with stop_on_signals(lambda: None):
        signal.signal(signal.SIGTERM, later)
    assert signal.getsignal(signal.SIGTERM) is later
    signal.signal(signal.SIGTERM, before)


def test_asyncio_run_has_no_handler_of_the_program() -> None:
    """It cancels its main task on SIGINT: handlers would be interrupted in their midst."""
    stops: list[int] = []

    async def main() -> None:
        with stop_on_signals(lambda: stops.append(1)):
            os.kill(os.getpid(), signal.SIGINT)
            await until(lambda: stops)

    asyncio.run(main())
    assert stops == [1]


def test_other_threads_have_no_signals() -> None:
    async def main() -> None:
        with stop_on_signals(lambda: None):
            assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL

    thread = threading.Thread(target=lambda: asyncio.run(main()))
    thread.start()
    thread.join(60)
    assert not thread.is_alive()
