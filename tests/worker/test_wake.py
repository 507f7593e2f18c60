"""Wake-ups: messages that are published, become due or are given back run at once, not at the next poll."""

import asyncio
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any
from uuid import uuid4

import pytest

from millpond import Delivery, GiveBack, Message, Millpond, Nack, NackMessage, State
from millpond.transports.database import store as store_module
from millpond.transports.database.postgres.engine import PostgresEngine
from tests.triggers import execute
from tests.waiting import SOON, until
from tests.worker.conftest import became, drained, on, working

pytestmark = pytest.mark.slow_on_servers

NEVER = 3600.0
"""A poll interval longer than any test."""
MORE_CASES = [(True, 0.0), (False, 0.5), (False, 2.0), (True, 2.0)]


async def waits(pond: Millpond) -> None:
    """Wait until the worker has found no message and waits."""
    assert pond.worker is not None
    await until(lambda: pond.worker.ready and pond.worker.in_flight == 0)
    await asyncio.sleep(0.1)  # it may not wait yet; too early makes the test weaker, not wrong


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
    """The message runs before the next poll."""
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
    await store.operations.pause("q")
    async with working(pond):
        id_ = await pond.publish("q", 1)
        await waits(pond)
        await became(pond, id_, State.PENDING)
        await store.operations.resume("q")
        await became(pond, id_, State.COMPLETED)


@on("sqlite", "mariadb", "postgresql")
@pytest.mark.parametrize(
    ("known", "delay"),
    [(False, 0.0), (True, 0.5), *(pytest.param(*case, marks=pytest.mark.slow) for case in MORE_CASES)],
)
async def test_a_message_of_another_process_needs_no_poll(
    make_pond: Callable[..., Millpond], known: bool, delay: float
) -> None:
    """Due now or later, in a priority that the worker has seen or not. Without a poll it would wait for an hour."""
    worker, publisher = make_pond(), make_pond()

    @worker.subscriber("q", max_poll=NEVER)
    async def handle(body: int) -> None: ...

    async with working(worker):
        if known:
            await became(publisher, await publisher.publish("q", 0, priority=7), State.COMPLETED)
        await waits(worker)
        id_ = await publisher.publish("q", 1, priority=7, delay=delay)
        await became(publisher, id_, State.COMPLETED)


@on("sqlite", "mariadb", "postgresql")
async def test_a_message_that_falls_due_between_a_claim_and_a_wait_is_due_now(
    make_pond: Callable[..., Millpond], monkeypatch: pytest.MonkeyPatch
) -> None:
    """No notice comes at that time, and the next check would be far away."""
    monkeypatch.setattr(store_module, "CHECK_EVERY", NEVER)
    store, other = [await make_pond(notify=False).transport for _ in range(2)]
    await store.publish([Message(queue="q", payload=b"0")])
    assert len(await store.claim(["q"])) == 1
    began = time.monotonic()
    await other.publish([Message(queue="q", payload=b"1", delay=2)])
    assert await store.claim(["q"]) == []
    await asyncio.sleep(began + 2.2 - time.monotonic())
    async with asyncio.timeout(SOON):
        await store.wait(["q"], NEVER)
    assert len(await store.claim(["q"])) == 1


_SCHEDULING = """
import asyncio, sys
from millpond import Millpond

async def main() -> None:
    async with Millpond(sys.argv[1]) as pond:
        for n in range(9):
            await pond.publish("q", n, delay=n / 8)

asyncio.run(main())
"""


@on("sqlite", "mariadb", "postgresql")
async def test_messages_that_another_process_schedules_are_on_time(pond: Millpond, url: str) -> None:
    """With max_poll=60. By polling alone, half of them would be later than the bound."""
    late: list[float] = []

    @pond.subscriber("q", max_poll=60)
    async def handle(body: int, delivery: Delivery) -> None:
        late.append(time.time() - delivery.claim.due_us / 1_000_000)

    async with working(pond):
        await waits(pond)
        command = (sys.executable, "-c", _SCHEDULING, url)
        process = await asyncio.create_subprocess_exec(*command)
        assert await process.wait() == 0
        assert await drained(pond) == {State.COMPLETED: 9}
    assert statistics.median(late) < 10


@on("sqlite", "mariadb", "postgresql")
@pytest.mark.parametrize("delay", [None, 0.3, *(pytest.param(delay, marks=pytest.mark.slow) for delay in (0.0, 2.0))])
async def test_a_retry_of_another_process_needs_no_poll(
    make_pond: Callable[..., Millpond], delay: float | None
) -> None:
    """The process that nacked it, or gave it back (None), has ended when the message falls due."""
    worker, other = make_pond(), make_pond()

    @worker.subscriber("q", max_poll=NEVER)
    async def handle(body: int) -> None: ...

    transport = await other.transport
    id_ = await other.publish("q", 1)
    (claim,) = await transport.claim(["q"])
    async with working(worker):
        await became(worker, await worker.publish("q", 0), State.COMPLETED)
        await waits(worker)
        again = GiveBack(claim.receipt) if delay is None else Nack(claim.receipt, delay=delay)
        assert await transport.settle([again]) == []
        await other.close()
        await became(worker, id_, State.COMPLETED)


@on("postgresql")
async def test_a_message_without_a_notice_is_found_by_the_next_look(pond: Millpond, url: str) -> None:
    """A plain INSERT into the table sends no notice, and its message may fall due between two reads."""

    @pond.subscriber("q", max_poll=NEVER)
    async def handle(body: int) -> None: ...

    async with working(pond):
        await became(pond, await pond.publish("q", 0), State.COMPLETED)
        await waits(pond)
        for wait in (0, 300_000):
            id_ = uuid4()
            at = "(extract(epoch FROM clock_timestamp()) * 1000000)::bigint"
            insert = (
                "INSERT INTO millpond_message (id, queue, priority, payload, due_at, state, created_at) "
                f"VALUES ('{id_}', 'q', 50, '1', {at} + {wait}, 'PENDING', {at})"
            )
            await asyncio.to_thread(execute, url, insert)
            await became(pond, id_, State.COMPLETED)


@on("postgresql")
async def test_notices_come_again_after_any_error_of_the_driver(
    make_pond: Callable[..., Millpond], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without them a message in a priority that is new to the worker would wait for the next poll."""
    listen, failed = PostgresEngine._listen, asyncio.Event()

    async def fail_once(self: PostgresEngine, *args: Any) -> None:
        if not failed.is_set():
            failed.set()
            raise EOFError
        await listen(self, *args)

    monkeypatch.setattr(PostgresEngine, "_listen", fail_once)
    worker, publisher = make_pond(), make_pond()

    @worker.subscriber("q", max_poll=NEVER)
    async def handle(body: int) -> None: ...

    async with working(worker):
        await failed.wait()
        await waits(worker)
        await became(publisher, await publisher.publish("q", 1, priority=7), State.COMPLETED, within=60)


@on("memory", "postgresql")
@pytest.mark.parametrize("paused", [False, True])
async def test_an_idle_worker_does_not_spin(pond: Millpond, paused: bool) -> None:
    """Wake-ups without a message lead to at most one claim per min_poll."""

    @pond.subscriber("q", min_poll=0.1)
    async def handle(body: int) -> None: ...

    store = await pond.transport
    if paused:
        await store.operations.pause("q")
    claims = 0
    async with working(pond):
        transport = pond.worker._pools[0].transport  # type: ignore[union-attr]
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
