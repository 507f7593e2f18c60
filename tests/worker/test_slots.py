"""A slot serves its next message whatever a handler did to its task; a slot that ends is replaced."""

import asyncio
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import pytest

from millpond import Millpond, Retry, State
from tests.waiting import until
from tests.worker.conftest import became, drained, on, row, working


def cancel_soon(delay: float) -> None:
    """Cancel the handler's task later, and forget it: a watchdog that stays armed."""
    task = asyncio.current_task()
    assert task is not None
    asyncio.get_running_loop().call_later(delay, task.cancel)


@on("memory", "postgresql")
@pytest.mark.parametrize("waits", [True, False])
async def test_a_late_cancel_costs_no_slot(pond: Millpond, waits: bool) -> None:
    """As many handlers run at once as before."""
    together, late = asyncio.Barrier(4), asyncio.Event()

    @pond.subscriber("q", max_workers=4)
    async def handle(body: str) -> None:
        if body == "watched":
            cancel_soon(0.1)
            asyncio.get_running_loop().call_later(0.15, late.set)
            if waits:
                await asyncio.sleep(0.01)
        else:
            await together.wait()

    async with working(pond):
        await pond.publish_many("q", ["watched"] * 8)
        await drained(pond)
        await late.wait()
        await pond.publish_many("q", ["together"] * 4)
        assert await drained(pond) == {State.COMPLETED: 12}


async def timed() -> None:
    async with asyncio.timeout(60):
        await asyncio.sleep(0.001)


async def grouped() -> None:
    async with asyncio.TaskGroup() as group:
        group.create_task(asyncio.sleep(0.001))


async def in_thread() -> None:
    await asyncio.to_thread(int)


@on("memory")
@pytest.mark.parametrize("waits", [True, False])
async def test_a_late_cancel_reaches_no_other_message(pond: Millpond, waits: bool) -> None:
    started = asyncio.Event()

    @pond.subscriber("q", max_workers=1, retry=Retry.none())
    async def handle(body: str) -> None:
        if body == "watched":
            cancel_soon(0.1)
            if waits:
                await asyncio.sleep(0)
        else:
            started.set()
            await asyncio.sleep(0.3)

    ids = await pond.publish_many("q", ["watched", "innocent"])
    async with working(pond):
        await started.wait()
        assert await drained(pond) == {State.COMPLETED: 2}
    assert [(await row(pond, id_)).attempts for id_ in ids] == [1, 1]


@on("memory")
async def test_a_cancel_that_the_handler_did_not_wait_for_reaches_no_other_message(pond: Millpond) -> None:
    @pond.subscriber("q", max_workers=1, retry=Retry.none())
    async def handle(body: str) -> None:
        if body == "cancels":
            task = asyncio.current_task()
            assert task is not None
            task.cancel()
        else:
            await asyncio.sleep(0)

    await pond.publish_many("q", ["cancels", "innocent"] * 2)
    async with working(pond):
        assert await drained(pond) == {State.COMPLETED: 4}


@on("memory")
@pytest.mark.parametrize("waits", [True, False])
@pytest.mark.parametrize("keep", [dict, WeakKeyDictionary])
async def test_what_is_kept_for_a_task_is_kept_for_one_message(pond: Millpond, keep: Any, waits: bool) -> None:
    """Libraries keep state for each task: scoped sessions in a dict, anyio in a weak one."""
    state, seen = keep(), []

    @pond.subscriber("q", max_workers=1)
    async def handle(body: int) -> None:
        state.setdefault(asyncio.current_task(), []).append(body)
        if waits:
            await asyncio.sleep(0)
        seen.append(list(state[asyncio.current_task()]))

    await pond.publish_many("q", range(5))
    await pond.run(until_idle=True, signals=False)
    assert seen == [[n] for n in range(5)]


@on("memory")
@pytest.mark.parametrize("wait", [partial(asyncio.sleep, 0), partial(asyncio.sleep, 0.001), timed, grouped, in_thread])
async def test_a_handler_that_waits_costs_no_task(pond: Millpond, wait: Any) -> None:
    tasks = []

    @pond.subscriber("q", max_workers=1)
    async def handle(body: int) -> None:
        tasks.append(id(asyncio.current_task()))
        await wait()

    await pond.publish_many("q", range(5))
    await pond.run(until_idle=True, signals=False)
    assert len(tasks) == 5 and len(set(tasks)) == 1


@on("memory")
async def test_an_idle_slot_that_is_cancelled_is_replaced_and_logged(
    pond: Millpond, caplog: pytest.LogCaptureFixture
) -> None:
    @pond.subscriber("q", max_workers=1)
    async def handle(body: int) -> None: ...

    async with working(pond):
        assert pond.worker is not None
        (slot,) = pond.worker._pools[0]._slots
        first = slot.task
        assert first is not None
        first.cancel()
        await until(lambda: slot.task is not first)
        await became(pond, await pond.publish("q", 1), State.COMPLETED)
    assert "a handler slot of" in caplog.text and "was cancelled and is replaced" in caplog.text


@on("memory")
async def test_a_slot_that_fails_is_replaced_and_its_message_comes_back(
    pond: Millpond, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    @pond.subscriber("q", max_workers=2, lease=1)
    async def handle(body: int) -> None: ...

    async with working(pond):
        assert pond.worker is not None
        pool = pond.worker._pools[0]
        fail_once(pool._results, monkeypatch)
        await became(pond, await pond.publish("q", 1), State.COMPLETED)
        await until(lambda: pool._living == 2)
    assert "failed and is replaced" in caplog.text


@on("memory")
async def test_a_run_without_slots_raises(pond: Millpond, monkeypatch: pytest.MonkeyPatch) -> None:
    @pond.subscriber("q", max_workers=1)
    async def handle(body: int) -> None: ...

    run = asyncio.create_task(pond.run(signals=False))
    await until(lambda: pond.worker is not None and pond.worker.claiming.is_set())
    assert pond.worker is not None
    fail_once(pond.worker._pools[0]._results, monkeypatch)
    await pond.publish("q", 1)
    with pytest.raises(ZeroDivisionError):
        await run


def fail_once(results: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A defect of the worker, which no handler can cause."""

    def fail(deliveries: Any) -> None:
        monkeypatch.undo()
        raise ZeroDivisionError

    monkeypatch.setattr(results, "settle_returned", fail)
