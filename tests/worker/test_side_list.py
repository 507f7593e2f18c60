"""Outcomes that the database refuses: the bad one alone waits, and only one whose data is refused is dropped."""

import asyncio
import contextlib
import os
import sqlite3
import subprocess
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from uuid import UUID

import psycopg
import pymysql
import pytest

from millpond import Delivery, Millpond, RejectMessage, Retry, State
from tests.rooms.transactions.callers import address
from tests.waiting import until
from tests.worker.conftest import counts, on, row, working

pytestmark = pytest.mark.slow_on_servers

DISK_FULL = {"postgresql": "53100", "mysql": "1021"}
"""Errors of the server that concern no single message, by the scheme of the URL."""
OWN_ERROR = {"postgresql": "P0001", "mysql": "1644"}
"""Errors of a user's trigger."""
BAD_DATA = {"postgresql": "22001", "mysql": "1406", "sqlite": ""}
"""The value is too long. SQLite has one error for all triggers: a violated constraint."""

SERVER_ERRORS = {
    "timeout": {"postgresql": "57014", "mysql": "1969"},
    "readonly": {"postgresql": "25006", "mysql": "1290"},
    "grant": {"postgresql": "42501", "mysql": "1142"},
    "corrupt": {"postgresql": "XX001", "mysql": "1712"},
}
"""A statement that ran too long, a read-only server, a missing grant, a damaged index."""

servers = on("postgresql", "mariadb")
databases = on("sqlite", "postgresql", "mariadb")


def execute(url: str, *statements: str) -> None:
    scheme, _, path = url.partition("://")
    connection: Any
    if scheme == "sqlite":
        with contextlib.closing(sqlite3.connect(path.removeprefix("/"))) as connection:
            for text in statements:
                connection.execute(text)
        return
    connection = psycopg.connect(url) if scheme == "postgresql" else pymysql.connect(**address(url))
    with connection, connection.cursor() as cursor:
        for text in statements:
            cursor.execute(text)
        connection.commit()


@contextlib.contextmanager
def refusing(
    url: str, codes: dict[str, str], *, id_: UUID | None = None, when: str = "1 = 1", name: str = "refuse"
) -> Iterator[None]:
    """The archive refuses messages with this error: one message, or those of a condition over `NEW`."""
    scheme = url.partition("://")[0]
    code = codes[scheme]
    if id_ is not None:
        when = f"NEW.id = '{id_}'" if scheme == "postgresql" else f"NEW.id = x'{id_.hex}'"
    if scheme == "postgresql":
        body = f"BEGIN IF {when} THEN RAISE 'refused' USING ERRCODE = '{code}'; END IF; RETURN NEW; END"
        begin = (
            f"CREATE OR REPLACE FUNCTION {name}() RETURNS trigger LANGUAGE plpgsql AS $$ {body} $$",
            f"CREATE TRIGGER {name} BEFORE INSERT ON millpond_archive FOR EACH ROW EXECUTE FUNCTION {name}()",
        )
        end = (f"DROP TRIGGER {name} ON millpond_archive",)
    elif scheme == "mysql":
        signal = f"SIGNAL SQLSTATE '45000' SET MYSQL_ERRNO = {code}, MESSAGE_TEXT = 'refused'"
        begin = (
            f"CREATE TRIGGER {name} BEFORE INSERT ON millpond_archive FOR EACH ROW IF {when} THEN {signal}; END IF",
        )
        end = (f"DROP TRIGGER {name}",)
    else:
        begin = (
            f"CREATE TRIGGER {name} BEFORE INSERT ON millpond_archive WHEN {when} "
            "BEGIN SELECT RAISE(ABORT, 'refused'); END",
        )
        end = (f"DROP TRIGGER {name}",)
    execute(url, *begin)
    try:
        yield
    finally:
        execute(url, *end)


@pytest.fixture
def runs(pond: Millpond) -> Counter[int]:
    """Number of runs of each body of the queue `q`."""
    runs: Counter[int] = Counter()

    @pond.subscriber("q", max_workers=50)
    async def handle(body: int) -> None:
        runs[body] += 1
        await asyncio.sleep(0)

    return runs


async def completed(pond: Millpond, number: int) -> bool:
    return (await counts(pond)).get(State.COMPLETED) == number


@servers
async def test_a_users_error_keeps_one_outcome(pond: Millpond, url: str, runs: Counter[int]) -> None:
    """The others are written. It is kept through every error, and written when the cause is gone."""
    ids = await pond.publish_many("q", range(64))
    with contextlib.ExitStack() as cause:
        cause.enter_context(refusing(url, OWN_ERROR, id_=ids[20]))
        async with working(pond):
            await until(lambda: completed(pond, 63))
            await until(lambda: pond.worker is not None and pond.worker.in_flight == 1)
            await asyncio.to_thread(cause.close)
            await until(lambda: completed(pond, 64))
            assert pond.worker is not None and pond.worker.lost == 0
    assert set(runs.values()) == {1}


@servers
async def test_errors_of_one_queue_do_not_stop_another(pond: Millpond, url: str, runs: Counter[int]) -> None:
    """Every outcome of one queue fails. That queue stops at a bound of unsettled messages, the other goes on."""
    ran: Counter[int] = Counter()

    @pond.subscriber("bad", max_workers=10, fetch=10)
    async def handle(body: int) -> None:
        ran[body] += 1

    with contextlib.ExitStack() as cause:
        cause.enter_context(refusing(url, OWN_ERROR, when="NEW.queue = 'bad'"))
        await pond.publish_many("bad", range(500))
        async with working(pond):
            await until(lambda: len(ran) >= 10)
            for n in range(10):
                await pond.publish_many("q", range(n * 20, n * 20 + 20))
                await until(lambda n=n: completed(pond, n * 20 + 20))
            assert len(ran) < 200
            await asyncio.to_thread(cause.close)
            await until(lambda: completed_in(pond, "bad", 500))
    assert set(ran.values()) == set(runs.values()) == {1}


async def completed_in(pond: Millpond, queue: str, number: int) -> bool:
    return (await counts(pond, queue)).get(State.COMPLETED) == number


@databases
async def test_refused_data_is_dropped_alone(
    pond: Millpond, url: str, runs: Counter[int], caplog: pytest.LogCaptureFixture
) -> None:
    """No later try could succeed. The message comes back when its lease ends."""
    await pond.transport  # a new SQLite file gets its tables
    ids = await pond.publish_many("q", range(64))
    with refusing(url, BAD_DATA, id_=ids[20]):
        async with working(pond):
            await until(lambda: completed(pond, 63))
            await until(lambda: pond.worker is not None and pond.worker.in_flight == 0)
        assert (await row(pond, ids[20])).state is State.PROCESSING
    assert set(runs.values()) == {1}
    assert caplog.text.count("cannot be written") == 1


@databases
async def test_a_refused_text_is_left_out(pond: Millpond, url: str) -> None:
    """The outcome is more than its error text."""

    @pond.subscriber("q", retry=Retry.none())
    async def handle(body: int) -> None:
        if body == 2:
            raise RejectMessage("no 💥") from ValueError("no 💥")
        raise ValueError("no 💥")

    await pond.transport
    ids = await pond.publish_many("q", range(3))
    with refusing(url, BAD_DATA, when="NEW.error IS NOT NULL"):
        async with working(pond):
            await until(lambda: failed(pond, 3))
    for id_ in ids:
        found = await row(pond, id_)
        assert (found.state, found.error, found.attempts) == (State.FAILED, None, 1)
        assert found.reason == ("no ?" if id_ == ids[2] else "retries used up")


async def failed(pond: Millpond, number: int) -> bool:
    return (await counts(pond)).get(State.FAILED) == number


@servers
async def test_a_full_disk_of_the_server_loses_no_result(pond: Millpond, url: str, runs: Counter[int]) -> None:
    """Results wait, claims stop at a bound, and no message runs twice."""
    await pond.publish_many("q", range(3000))
    with contextlib.ExitStack() as cause:
        cause.enter_context(refusing(url, DISK_FULL))
        async with working(pond):
            await until(lambda: len(runs) >= 200)
            assert pond.worker is not None
            before = -1
            while before != len(runs):  # until the claims stop
                before = len(runs)
                await asyncio.sleep(1)
            assert len(runs) == pond.worker.in_flight < 3000
            await asyncio.to_thread(cause.close)
            await until(lambda: completed(pond, 3000))
            assert pond.worker.lost == 0
    assert len(runs) == 3000
    assert set(runs.values()) == {1}


@servers
async def test_results_wait_through_errors_of_the_server(pond: Millpond, url: str) -> None:
    """For longer than a lease. No message runs twice, and all are completed when the cause is gone."""
    runs: Counter[tuple[str, int]] = Counter()

    async def handle(body: int, delivery: Delivery) -> None:
        runs[delivery.queue, body] += 1

    for queue in SERVER_ERRORS:
        pond.subscriber(queue, lease=1)(handle)
        await pond.publish_many(queue, range(5))
    with contextlib.ExitStack() as causes:
        for queue, codes in SERVER_ERRORS.items():
            causes.enter_context(refusing(url, codes, when=f"NEW.queue = '{queue}'", name=f"refuse_{queue}"))
        async with working(pond):
            worker = pond.worker
            assert worker is not None
            await until(lambda: len(runs) == 20)
            await until(lambda: worker.obstacle == "a result cannot be written")  # for a lease
            await asyncio.to_thread(causes.close)
            for queue in SERVER_ERRORS:
                await until(lambda queue=queue: completed_in(pond, queue, 5))
            assert worker.lost == 0
    assert set(runs.values()) == {1}


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of three megabytes."""
    folder = tmp_path / "disk"
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=3m", "tmpfs", str(folder)], check=True)
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


async def test_a_full_disk_loses_no_result(small_disk: Path, caplog: pytest.LogCaptureFixture) -> None:
    """On SQLite: results wait until there is room again."""
    path = small_disk / "queue.db"
    pond = Millpond(f"sqlite:///{path}", busy_timeout=1)
    runs: Counter[str] = Counter()
    full = asyncio.Event()

    @pond.subscriber("q", max_workers=100)
    async def handle(body: str) -> None:
        runs[body[:3]] += 1
        await full.wait()

    await pond.publish_many("q", [f"{n:03}" + "x" * 2000 for n in range(100)])
    async with working(pond):
        await until(lambda: len(runs) == 100)
        filler = small_disk / "filler"
        fill(filler)
        full.set()
        assert pond.worker is not None
        await until(lambda: caplog.text.count("outcomes wait") >= 3)
        assert pond.worker.in_flight == 100
        filler.unlink()
        await until(lambda: completed(pond, 100))
        assert pond.worker.lost == 0
    assert set(runs.values()) == {1}
    await pond.close()
    with contextlib.closing(sqlite3.connect(path)) as connection:
        assert connection.execute("PRAGMA integrity_check").fetchone() == ("ok",)


def fill(path: Path) -> None:
    """Write until the file system is full."""
    file = os.open(path, os.O_CREAT | os.O_WRONLY)
    try:
        for size in (4096, 1):
            with contextlib.suppress(OSError):
                while True:
                    os.write(file, b"x" * size)
    finally:
        os.close(file)
