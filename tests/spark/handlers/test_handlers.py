"""Subscribers in tasks of a local Spark: outcomes, stops, crashes, and connections to the driver."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest

import millpond.spark
from millpond import Millpond, State
from millpond.errors import InvalidOption, Unsupported
from millpond.spark.handlers import executor as task
from millpond.spark.handlers.driver import TaskSupervisor
from millpond.spark.handlers.executor import BEAT, RUN, STOP, Hello, TaskOrder, keep_worker
from millpond.spark.handlers.run import reference, supervisor_for
from servers import ports
from tests.spark.handlers.shop import Shop
from tests.waiting import is_alive, until


@pytest.fixture
def on_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


@pytest.fixture(params=["sqlite", "postgres", "mariadb"])
async def shop(request: pytest.FixtureRequest, on_path: Path) -> AsyncIterator[Shop]:
    shop = Shop(on_path, request.getfixturevalue(f"{request.param}_url"))
    yield shop
    await shop.close()
    sys.modules.pop(shop.name, None)


only = lambda *names: pytest.mark.parametrize("shop", names, indirect=True)  # noqa: E731


@asynccontextmanager
async def at_work(shop: Shop, spark: Any, **options: Any) -> AsyncIterator[tuple[TaskSupervisor, asyncio.Task[int]]]:
    """Two tasks that run until this block ends."""
    given = {"at": None, "tasks": 2, "queues": None, "grace": 60.0, "until_idle": False, **options}
    supervisor = supervisor_for(shop.imported().pond, spark, **given)
    work = asyncio.create_task(supervisor.run())
    try:
        await until(lambda: len(shop.workers()) == 2 or work.done())
        yield supervisor, work
        supervisor.stop()
        async with asyncio.timeout(60):
            assert await work == 0, supervisor.last_output
    finally:
        while not work.done():
            supervisor.stop()
            await asyncio.wait([work], timeout=1)


async def test_the_same_outcomes_on_every_database(shop: Shop, spark: Any) -> None:
    pond = shop.imported().pond
    await shop.pond.publish_many("orders", list(range(100)))
    await asyncio.to_thread(millpond.spark.run, pond, spark, queues=["orders"], until_idle=True)
    assert await shop.drained("orders") == {State.COMPLETED: 90, State.FAILED: 10}
    runs = [(int(n), int(deliveries)) for n, deliveries, _ in shop.notes("order")]
    assert sorted(runs) == sorted([(n, 1) for n in range(100)] + [(n, 2) for n in range(4, 100, 10)])
    assert os.getpid() not in shop.workers()
    await until(lambda: not any(is_alive(pid) for pid in shop.workers()))


@only("sqlite")
async def test_a_stop_lets_handlers_finish_and_gives_the_rest_back(shop: Shop, spark: Any) -> None:
    await shop.pond.publish_many("held", list(range(10)))
    async with at_work(shop, spark) as (supervisor, work):
        await until(lambda: len(shop.notes("held")) == 2)
        await until(lambda: supervisor.status.in_flight >= 2)
        assert supervisor.running == 2
        supervisor.stop()
        await until(lambda: not supervisor.status.ready)
        assert not work.done()
        shop.give_the_word()
        assert await work == 0
    assert supervisor.status.counts["ack"] == 2
    assert await shop.counts("held") == {State.COMPLETED: 2, State.PENDING: 8}
    waiting = await (await shop.pond.transport).operations.browse("held")
    assert {row.deliveries for row in waiting} == {0}, "what was not started cost no delivery"


@only("postgres")
async def test_crashes_end_neither_the_application_nor_its_neighbours(
    shop: Shop, spark: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """A local Spark gives up a task at its first failure."""
    async with at_work(shop, spark) as (supervisor, _):
        await shop.pond.publish("deadly", 1)  # the handler kills its worker
        assert await shop.drained("deadly") == {State.COMPLETED: 1}
        assert [deliveries for _, deliveries, _ in shop.notes("deadly")] == ["1", "2"]
        await until(lambda: len(shop.workers()) == 3)
        assert "ended (exit code 9" in caplog.text
        its_task = int(shop.notes("started")[-1][1])
        orphan = shop.workers()[-1]
        os.kill(its_task, signal.SIGKILL)  # the task's own process, which Spark sees
        await until(lambda: not is_alive(orphan))
        await until(lambda: len(shop.workers()) == 4 and supervisor.running == 2)
        await shop.pond.publish_many("orders", [0, 1, 2])
        assert await shop.drained("orders") == {State.COMPLETED: 3}
    assert not any(is_alive(pid) for pid in shop.workers())


@only("sqlite")
async def test_executors_that_know_fewer_subscribers_say_so(shop: Shop, spark: Any) -> None:
    pond = shop.imported().pond

    @pond.subscriber("late")
    async def only_here(n: int) -> None: ...

    with pytest.raises(InvalidOption, match="no subscriber serves the queue 'late'; those served are: deadly, held"):
        await asyncio.to_thread(millpond.spark.run, pond, spark)


# --- the driver's connections, without any job ----------------------------------------------------------


@pytest.fixture
async def driver(shop: Shop, spark: Any) -> AsyncIterator[tuple[TaskSupervisor, Callable[..., Any]]]:
    """A listening driver, and a function that connects like its tasks."""
    supervisor = supervisor_for(shop.imported().pond, spark, at=None, tasks=1, queues=None, grace=1.0, until_idle=False)
    writers: list[asyncio.StreamWriter] = []

    async def connect(token: str | None = None) -> asyncio.StreamReader:
        reader, writer = await asyncio.open_connection("127.0.0.1", supervisor._port)
        writers.append(writer)
        writer.write(msgspec.json.encode(Hello(token or supervisor._token, 1, "a-host")) + b"\n")
        return reader

    async with supervisor._listening():
        yield supervisor, connect
        for writer in writers:
            writer.close()


async def word(reader: asyncio.StreamReader) -> bytes:
    async with asyncio.timeout(60):
        while (line := await reader.readline()) == BEAT:
            pass
    return line


@only("sqlite")
async def test_a_second_copy_of_a_task_waits_for_the_first_to_end(driver: Any) -> None:
    supervisor, connect = driver
    first = await connect()
    assert await word(first) == RUN
    second = await connect()
    for _ in range(2):
        async with asyncio.timeout(60):
            assert await second.readline() == BEAT, "the driver is there, and says nothing else"
    assert supervisor.running == 1
    for writer in list(supervisor._connected):
        if writer is supervisor._slots[0].writer:
            writer.close()
    assert await word(second) == RUN


@only("sqlite")
async def test_whoever_does_not_know_the_word_is_turned_away(driver: Any) -> None:
    supervisor, connect = driver
    assert await word(await connect("a-guess")) == b""
    assert supervisor.running == 0


@only("sqlite")
async def test_a_task_that_comes_after_the_stop_has_nothing_to_do(driver: Any) -> None:
    supervisor, connect = driver
    supervisor.stop()
    assert await word(await connect()) == STOP


# --- a task, without Spark ------------------------------------------------------------------------------


@only("sqlite")
@pytest.mark.parametrize("how", ["closes", "is silent"])
async def test_without_the_driver_there_is_no_work(
    shop: Shop, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], how: str, free_port: int
) -> None:
    """The worker stops in order: running handlers finish first."""
    writers: list[asyncio.StreamWriter] = []

    async def drive(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writers.append(writer)
        await reader.readline()
        writer.write(RUN)

    await shop.pond.publish("held", 1)
    arguments = ("run", shop.module(shop.folder))
    order = TaskOrder(1, "127.0.0.1", free_port, "", arguments, (str(shop.folder),), 60.0)
    server = await asyncio.start_server(drive, "127.0.0.1", free_port)
    work = asyncio.create_task(asyncio.to_thread(lambda: next(keep_worker(order, []))))
    await until(lambda: shop.notes("held"))
    monkeypatch.setattr(task, "SILENT", 0.1)  # from its next wait on, after a beat
    writers[0].write(BEAT)
    if how == "closes":
        writers[0].close()
    await until(lambda: "stopping:" in capsys.readouterr().err)
    assert not work.done(), "the handler runs"
    shop.give_the_word()
    assert (await work).code == 0
    assert await shop.counts("held") == {State.COMPLETED: 1}
    server.close()
    writers[0].close()


async def test_a_task_that_cannot_reach_the_driver_says_so(free_port: int) -> None:
    order = TaskOrder(1, "127.0.0.1", free_port, "", (), (), 1.0)
    ended = await asyncio.to_thread(lambda: next(keep_worker(order, [])))
    assert ended.code == 1 and f"cannot reach the driver at 127.0.0.1:{free_port}" in ended.last_output


@pytest.fixture
def free_port() -> int:
    return ports.free_port()


# --- invalid arguments --------------------------------------------------------------------------------


def test_what_is_refused_at_once(spark: Any) -> None:
    pond = Millpond("memory://")
    with pytest.raises(InvalidOption, match="no subscriber"):
        millpond.spark.run(pond, spark)

    @pond.subscriber("orders")
    async def ship(n: int) -> None: ...

    with pytest.raises(Unsupported, match="SHARED"):
        millpond.spark.run(pond, spark)
    with pytest.raises(InvalidOption, match="'cancelled'"):
        millpond.spark.run(pond, spark, queues=["cancelled"])
    with pytest.raises(InvalidOption, match="no module has it as a global"):
        reference(pond)


@only("sqlite")
def test_a_pond_is_found_where_its_subscribers_are(shop: Shop) -> None:
    assert reference(shop.imported().pond) == f"{shop.name}:pond"
