"""Event loops of several threads share one database in memory."""

import asyncio
import threading
from collections.abc import Callable

import millpond
from millpond import Message

THREADS = 4
ROUNDS = 20


def at_once(work: Callable[[], None]) -> None:
    """Run `work` in several threads that begin together; the first error is raised."""
    ready, errors = threading.Barrier(THREADS), list[BaseException]()

    def run() -> None:
        ready.wait()
        try:
            work()
        except BaseException as e:
            errors.append(e)

    threads = [threading.Thread(target=run) for _ in range(THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


def test_threads_that_connect_at_once_share_a_named_database() -> None:
    async def waiting(name: str) -> int:
        store = await millpond.connect(name)
        (stats,) = await store.operations.count(["q"])
        await store.close()
        return sum(stats.counts.values())

    async def publish(name: str, meanwhile: threading.Barrier) -> None:
        store = await millpond.connect(name)
        await store.publish([Message(queue="q", payload=b"1")])
        if meanwhile.wait() == 0:  # in one of the threads, when all have published
            counted.append(await waiting(name))
        meanwhile.wait()  # a database ends with its last handle
        await store.close()

    for number in range(ROUNDS):
        counted: list[int] = []
        name, meanwhile = f"memory://threads-{number}", threading.Barrier(THREADS)
        at_once(lambda: asyncio.run(publish(name, meanwhile)))  # noqa: B023
        assert set(counted) == {THREADS}


def test_threads_that_connect_and_close_find_an_open_database() -> None:
    async def use() -> None:
        for _ in range(ROUNDS):
            store = await millpond.connect("memory://reopened")
            await store.publish([Message(queue="q", payload=b"1")])
            await store.close()

    at_once(lambda: asyncio.run(use()))
