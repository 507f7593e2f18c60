"""`delivery.step`: work outside of a transaction, with a result that later deliveries get."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from millpond import Delivery, Millpond, State, Step, StepHeld
from millpond.errors import BodyNotEncodable
from tests.worker.conftest import became, drained, on, working

pytestmark = pytest.mark.slow_on_servers

on_every_store = on("memory", "sqlite", "postgresql", "mariadb")


@on_every_store
async def test_a_step_that_is_done_is_not_done_again(pond: Millpond) -> None:
    keys: list[str] = []
    results: list[Any] = []

    @pond.subscriber("q")
    async def handle(body: int, delivery: Delivery) -> None:
        async def charge(step: Step) -> dict[str, Any]:
            keys.append(step.key)
            return {"paid": body, "by": (1, "card")}

        results.append(await delivery.step("charge", charge))
        results.append(await delivery.step("text", lambda step: "as it is"))
        if delivery.attempt == 1:
            await delivery.nack(delay=0)

    async with working(pond):
        id_ = await pond.publish("q", 7)
        await became(pond, id_, State.COMPLETED)
    assert results == [{"paid": 7, "by": [1, "card"]}, "as it is"] * 2
    assert len(keys) == 1 and len(keys[0]) == 36


@on_every_store
async def test_a_synchronous_handler_has_steps_too(pond: Millpond) -> None:
    ran: list[str] = []

    @pond.subscriber("q")
    def handle(body: int, delivery: Delivery) -> None:
        for _ in range(2):
            assert delivery.step_sync("charge", lambda step: ran.append(step.key), scope="order-7") is None

    async with working(pond):
        await pond.publish("q", 1)
        assert await drained(pond) == {State.COMPLETED: 1}
    assert len(ran) == 1


@on_every_store
async def test_tasks_of_a_handler_that_ask_for_one_step_get_one_result(pond: Millpond) -> None:
    ran: list[int] = []
    results: list[Any] = []

    @pond.subscriber("q")
    async def handle(body: int, delivery: Delivery) -> None:
        began, go_on = asyncio.Event(), asyncio.Event()

        async def charge(step: Step) -> int:
            ran.append(len(ran))
            began.set()
            await go_on.wait()
            if ran == [0]:
                raise ValueError("no answer")
            return len(ran)

        first = asyncio.ensure_future(delivery.step("charge", charge))
        await began.wait()
        impatient, *others = [asyncio.ensure_future(delivery.step("charge", charge)) for _ in range(4)]
        await asyncio.sleep(0)  # all of them wait for the first
        impatient.cancel()
        go_on.set()
        results.extend(await asyncio.gather(first, impatient, *others, return_exceptions=True))

    async with working(pond):
        await became(pond, await pond.publish("q", 1), State.COMPLETED)
    failed, cancelled, *good = results
    assert str(failed) == "no answer" and isinstance(cancelled, asyncio.CancelledError) and good == [2, 2, 2]
    assert ran == [0, 1]


@on_every_store
async def test_threads_of_a_handler_that_ask_for_one_step_get_one_result(pond: Millpond) -> None:
    ran: list[str] = []
    results: list[int] = []

    @pond.subscriber("q")
    def handle(body: int, delivery: Delivery) -> None:
        def charge(step: Step) -> int:
            ran.append(step.key)
            return body

        with ThreadPoolExecutor(3) as threads:
            results.extend(threads.map(lambda _: delivery.step_sync("charge", charge), range(3)))

    async with working(pond):
        await became(pond, await pond.publish("q", 7), State.COMPLETED)
    assert (len(ran), results) == (1, [7, 7, 7])


@on_every_store
async def test_a_step_that_fails_runs_again_with_the_same_key(pond: Millpond) -> None:
    keys: list[str] = []

    @pond.subscriber("q")
    async def handle(body: int, delivery: Delivery) -> None:
        def charge(step: Step) -> int:
            keys.append(step.key)
            if len(keys) < 3:
                raise ValueError("no answer")
            return 1

        for _ in range(2):
            try:
                await delivery.step("charge", charge)
            except ValueError:
                if keys and delivery.attempt == 1 and len(keys) == 2:
                    await delivery.nack(delay=0)
        with pytest.raises(BodyNotEncodable):
            await delivery.step("bytes", lambda step: b"x")

    async with working(pond):
        await became(pond, await pond.publish("q", 1), State.COMPLETED)
    assert len(keys) == 3 and len(set(keys)) == 1


@on_every_store
async def test_a_step_of_another_live_delivery_sends_the_message_back_uncounted(pond: Millpond) -> None:
    began, go_on, held = asyncio.Event(), asyncio.Event(), asyncio.Event()
    results: list[tuple[int, int]] = []

    @pond.subscriber("q", max_workers=2)
    async def handle(body: int, delivery: Delivery) -> None:
        async def charge(step: Step) -> int:
            began.set()
            await go_on.wait()
            return body

        try:
            results.append((body, await delivery.step("charge", charge, scope="order-7")))
        except StepHeld:
            held.set()
            raise

    async with working(pond):
        await pond.publish("q", 1)
        await began.wait()
        second = await pond.publish("q", 2)
        await held.wait()
        row = await became(pond, second, State.PENDING)
        assert (row.deliveries, row.attempts) == (0, 0)
        go_on.set()
        await became(pond, second, State.COMPLETED)
    assert sorted(results) == [(1, 1), (2, 1)]


_OWNER = """
import asyncio, sys
from millpond import Delivery, Millpond
pond = Millpond(sys.argv[1])

@pond.subscriber("owner")
async def handle(body: int, delivery: Delivery) -> None:
    async def charge(step):
        print(step.key, flush=True)
        await asyncio.sleep(3600)
    await delivery.step("charge", charge, scope="order-7")

asyncio.run(pond.run())
"""


@on("sqlite", "postgresql", "mariadb")
async def test_a_killed_owner_releases_its_step(make_pond: Callable[..., Millpond], url: str) -> None:
    pond = make_pond()
    await pond.publish("owner", 1)
    owner = await asyncio.create_subprocess_exec(sys.executable, "-c", _OWNER, url, stdout=subprocess.PIPE)
    assert owner.stdout is not None
    key = (await owner.stdout.readline()).decode().strip()
    held = asyncio.Event()
    keys: list[str] = []

    @pond.subscriber("q")
    async def handle(body: int, delivery: Delivery) -> None:
        try:
            await delivery.step("charge", lambda step: keys.append(step.key), scope="order-7")
        except StepHeld:
            held.set()
            raise

    async with working(pond):
        id_ = await pond.publish("q", 2)
        await held.wait()
        assert keys == []
        owner.kill()
        await owner.wait()
        await became(pond, id_, State.COMPLETED)
    assert keys == [key]
