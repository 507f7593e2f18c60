"""Wake-ups: what is published, falls due or is given back is handled at once, not at the next poll."""

import asyncio
import time
from collections.abc import Callable

import pytest

from millpond import Millpond, NackMessage, State
from tests.waiting import until
from tests.worker.conftest import became, drained, on, working

NEVER = 3600.0
"""A poll interval that no test waits for."""


async def waits(pond: Millpond) -> None:
    """Until the worker has found nothing and waits."""
    assert pond.worker is not None
    await until(lambda: pond.worker.ready and pond.worker.in_flight == 0)
    await asyncio.sleep(0.1)  # it may be on its way to wait; too early it would be a weaker test, not a failure


async def test_a_publish_in_this_process_wakes_its_worker(pond: Millpond) -> None:
    @pond.subscriber("q", max_poll=NEVER)
    async def handle(body: int) -> None: ...

    async with working(pond):
        await waits(pond)
        for _ in range(3):
            await became(pond, await pond.publish("q", 1), State.COMPLETED)
        await asyncio.to_thread(pond.publish_sync, "q", 2)
        assert await drained(pond) == {State.COMPLETED: 4}


async def test_a_scheduled_message_is_handled_when_due(pond: Millpond) -> None:
    """VT-D7: not at the next poll."""
    at = []

    @pond.subscriber("q", max_poll=NEVER)
    async def handle(body: int) -> None:
        at.append(time.monotonic())

    async with working(pond):
        await waits(pond)
        published = time.monotonic()
        id_ = await pond.publish("q", 1, delay=0.6)
        await became(pond, id_, State.COMPLETED)
    assert at[0] - published >= 0.59


async def test_a_retry_is_handled_when_due(pond: Millpond) -> None:
    runs = []

    @pond.subscriber("q", max_poll=NEVER)
    async def handle(body: int) -> None:
        runs.append(time.monotonic())
        if len(runs) == 1:
            raise NackMessage(delay=0.3)

    async with working(pond):
        id_ = await pond.publish("q", 1)
        await became(pond, id_, State.COMPLETED)
    assert runs[1] - runs[0] >= 0.29


@on("memory", "sqlite", "postgresql", "mariadb")
async def test_a_resumed_queue_is_handled_at_once(pond: Millpond) -> None:
    @pond.subscriber("q", max_poll=NEVER)
    async def handle(body: int) -> None: ...

    store = await pond.transport
    await store.pause("q")  # type: ignore[attr-defined]
    async with working(pond):
        id_ = await pond.publish("q", 1)
        await waits(pond)
        await became(pond, id_, State.PENDING)
        await store.resume("q")  # type: ignore[attr-defined]
        await became(pond, id_, State.COMPLETED)


@on("sqlite", "mariadb")
async def test_what_no_wake_up_told_is_found_by_polling(make_pond: Callable[..., Millpond]) -> None:
    worker, publisher = make_pond(), make_pond()

    @worker.subscriber("q", max_poll=0.2)
    async def handle(body: int) -> None: ...

    async with working(worker):
        await waits(worker)
        id_ = await publisher.publish("q", 1)
        await became(publisher, id_, State.COMPLETED)


@on("memory", "postgresql")
@pytest.mark.parametrize("paused", [False, True])
async def test_an_idle_worker_does_not_spin(pond: Millpond, paused: bool) -> None:
    """Wake-ups that lead to nothing are followed up at most every min_poll."""

    @pond.subscriber("q", min_poll=0.1)
    async def handle(body: int) -> None: ...

    store = await pond.transport
    if paused:
        await store.pause("q")  # type: ignore[attr-defined]
    claims = 0
    async with working(pond):
        transport = pond.worker._attempts[0].transport  # type: ignore[union-attr]
        claim = transport.claim

        async def counted(*args: object, **options: object) -> object:
            nonlocal claims
            claims += 1
            return await claim(*args, **options)  # type: ignore[arg-type]

        transport.claim = counted  # type: ignore[method-assign]
        began = time.monotonic()
        while time.monotonic() - began < 0.5:
            await pond.publish("q" if paused else "another", 1)
            await asyncio.sleep(0.01)
        del transport.claim  # type: ignore[attr-defined]
        lasted = time.monotonic() - began
    assert claims < 10 + lasted / 0.1
