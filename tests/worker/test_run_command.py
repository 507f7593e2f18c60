"""`millpond run` as it is used: real processes, real signals, SQLite and PostgreSQL."""

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import textwrap
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from millpond import Millpond, State
from millpond.cli import run as command
from tests.waiting import SOON, ended, is_alive, until
from tests.worker.conftest import counts, drained, on, row

APP = """
import asyncio, logging, os, threading, time
from millpond import Delivery, Millpond

pond = Millpond({url!r})
log = logging.getLogger("shop")


def note(*words):
    with open("notes", "a") as file:
        file.write(" ".join(map(str, words)) + "\\n")


@pond.on_start
async def started():
    note("started", os.getpid())


@pond.subscriber("orders", max_workers=5)
async def ship(order: dict, delivery: Delivery):
    note("order", order["n"], delivery.claim.deliveries, os.getpid())
    log.info("shipping for %s", {url!r})
    await asyncio.sleep(order.get("takes", 0))
    while "waits for" in order and not os.path.exists(order["waits for"]):
        await asyncio.sleep(0.02)


@pond.subscriber("hang")
def hang(body: int):
    note("hangs")
    time.sleep(1000)


@pond.subscriber("die", max_crashes=10, lease=5)
async def die(body: int):
    note("dies", os.getpid())
    os._exit(9)
"""


class Shop:
    """An application in a folder, its worker processes, and what its handlers noted."""

    def __init__(self, folder: Path, url: str) -> None:
        self.folder = folder
        self.url = url
        self.write("shop", APP)
        self._processes: list[subprocess.Popen[bytes]] = []

    def write(self, module: str, code: str) -> None:
        (self.folder / f"{module}.py").write_text(textwrap.dedent(code).replace("{url!r}", repr(self.url)))

    def start(self, *arguments: str) -> subprocess.Popen[bytes]:
        stderr = (self.folder / "stderr").open("ab")
        with stderr:
            process = subprocess.Popen(
                [sys.executable, "-m", "millpond", "run", *arguments],
                cwd=self.folder,
                stderr=stderr,
                stdin=subprocess.DEVNULL,
                env={**os.environ, "COLUMNS": "200"},
            )
        self._processes.append(process)
        return process

    @property
    def stderr(self) -> str:
        return (self.folder / "stderr").read_text()

    @property
    def notes(self) -> list[list[str]]:
        path = self.folder / "notes"
        return [line.split() for line in path.read_text().splitlines()] if path.exists() else []

    def orders(self) -> list[str]:
        return [note[1] for note in self.notes if note[0] == "order"]

    def workers(self) -> list[int]:
        return [int(note[1]) for note in self.notes if note[0] == "started"]

    def close(self) -> None:
        for process in self._processes:
            if process.poll() is None:
                process.kill()
                process.wait()
        for pid in self.workers():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


@pytest.fixture
def shop(tmp_path: Path, url: str) -> Iterator[Shop]:
    shop = Shop(tmp_path, url)
    yield shop
    shop.close()


both = on("sqlite", "postgresql")


@both
async def test_until_idle(pond: Millpond, shop: Shop) -> None:
    await pond.publish_many("orders", [{"n": n} for n in range(20)])
    process = shop.start("shop:pond", "--until-idle")
    assert await ended(process) == 0, shop.stderr
    assert await counts(pond, "orders") == {State.COMPLETED: 20}
    assert "20 handled" in shop.stderr and "0 failed" in shop.stderr
    if pond.url.password:
        assert pond.url.password not in shop.stderr
        assert "shipping for" in shop.stderr


@both
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_a_signal_lets_handlers_finish(pond: Millpond, shop: Shop, number: int) -> None:
    if number == signal.SIGINT and shop.url.startswith("sqlite"):
        return  # the same code; one database is enough
    process = shop.start("shop", "--queues", "orders")
    await pond.publish("orders", {"n": 1, "takes": 1})
    await until(shop.orders)
    process.send_signal(number)
    assert await ended(process) == 0, shop.stderr
    assert await counts(pond, "orders") == {State.COMPLETED: 1}
    assert "stopped" in shop.stderr


@on("postgresql")
async def test_a_second_signal_interrupts(pond: Millpond, shop: Shop) -> None:
    process = shop.start("shop:pond", "--graceful-timeout", "10m")
    id_ = await pond.publish("orders", {"n": 1, "takes": 600})
    await until(shop.orders)
    process.terminate()
    await until(lambda: "stopping:" in shop.stderr)  # two signals at the same instant are one
    assert process.poll() is None
    process.terminate()
    assert await ended(process) == 0
    found = await row(pond, id_)
    assert (found.state, found.deliveries, found.attempts) == (State.PENDING, 1, 0)


@on("sqlite")
async def test_a_thread_that_hangs_does_not_keep_the_process(pond: Millpond, shop: Shop) -> None:
    process = shop.start("shop:pond", "--graceful-timeout", "100ms")
    id_ = await pond.publish("hang", 1)
    await until(lambda: ["hangs"] in shop.notes)
    process.terminate()
    assert await ended(process) == 0
    assert (await row(pond, id_)).state is State.PENDING


@both
async def test_two_workers_one_killed(pond: Millpond, shop: Shop) -> None:
    """Restarted; its messages are back in about two seconds, and none is lost."""
    process = shop.start("shop:pond", "--workers", "2", "--log-format", "json")
    await until(lambda: len(shop.workers()) == 2)
    first, second = shop.workers()
    await asyncio.sleep(3)  # a reaper judges only after some seconds of unbroken connection of its own
    await pond.publish_many("orders", [{"n": n, "takes": 600 if n < 4 else 0} for n in range(4)])
    await until(lambda: len(shop.orders()) == 4)
    victims = {note[3] for note in shop.notes if note[0] == "order"}
    victim = int(victims.pop())
    held = [note[1] for note in shop.notes if note[0] == "order" and note[3] == str(victim)]
    os.kill(victim, signal.SIGKILL)
    killed = time.monotonic()
    await until(lambda: all(shop.orders().count(n) == 2 for n in held))
    assert time.monotonic() - killed < 15, "about two seconds on a quiet machine, and not a lease later"
    again = [note for note in shop.notes if note[0] == "order" and note[1] in held][len(held) :]
    assert {note[2] for note in again} == {"2"}, "flagged as redelivered"
    await until(lambda: len(shop.workers()) == 3)
    third = shop.workers()[2]
    assert third not in (first, second)
    process.terminate()
    await until(lambda: shop.stderr.count("stopping:") == 2)  # two signals at the same instant are one
    process.terminate()
    assert await ended(process) == 0, shop.stderr
    await until(lambda: not is_alive(first) and not is_alive(second) and not is_alive(third))
    assert await counts(pond, "orders") == {State.PENDING: 4}
    lines = [json.loads(line) for line in shop.stderr.splitlines()]
    assert any("killed by SIGKILL" in line["message"] for line in lines)
    assert {line.get("worker") for line in lines} == {None, 1, 2}


@on("sqlite")
async def test_a_stop_while_workers_start(shop: Shop) -> None:
    """Told before they could listen: they had nothing to finish, and all went as told."""
    process = shop.start("shop:pond", "--workers", "2")
    await until(lambda: (shop.folder / "stderr").exists() and "worker 2 started" in shop.stderr)
    process.terminate()
    assert await ended(process) == 0, shop.stderr


@on("sqlite")
async def test_several_workers_until_idle(pond: Millpond, shop: Shop) -> None:
    await pond.publish_many("orders", [{"n": n, "takes": 0.02} for n in range(60)])
    process = shop.start("shop:pond", "--workers", "2", "--until-idle")
    assert await ended(process) == 0, shop.stderr
    assert await counts(pond, "orders") == {State.COMPLETED: 60}
    assert len(shop.workers()) == 2
    assert "60 handled" in shop.stderr, "the workers' counts come together"


@on("sqlite")
async def test_workers_stop_when_their_supervisor_dies(pond: Millpond, shop: Shop) -> None:
    process = shop.start("shop:pond", "--workers", "2")
    await pond.publish("orders", {"n": 1, "takes": 0.5})
    await until(lambda: len(shop.workers()) == 2 and shop.orders())
    process.kill()
    await ended(process)
    await until(lambda: not any(is_alive(pid) for pid in shop.workers()))
    assert await drained(pond, "orders") == {State.COMPLETED: 1}


@on("sqlite")
async def test_a_worker_that_keeps_dying_is_restarted_ever_more_slowly(pond: Millpond, shop: Shop) -> None:
    shop.write("dying", "from shop import *\n\n@pond.on_start\ndef die_at_once():\n    os._exit(7)\n")
    process = shop.start("dying:pond", "--workers", "2", "--log-format", "json")
    await until(lambda: shop.stderr.count("another one starts in 1.0 s") == 2)
    process.terminate()
    assert await ended(process) == 1
    pauses = [line["message"] for line in map(json.loads, shop.stderr.splitlines()) if "another one" in line["message"]]
    assert all("exit code 7" in text for text in pauses)
    assert [text.rsplit("in ", 1)[1] for text in pauses if "worker 1" in text][:2] == ["0.5 s", "1.0 s"]


@on("sqlite")
async def test_workers_that_cannot_be_started_right_end_the_supervisor(pond: Millpond, shop: Shop) -> None:
    shop.write("wrong", "from shop import *\n\n@pond.subscriber('w')\nasync def two(a: dict, b: dict): ...\n")
    process = shop.start("wrong:pond", "--workers", "2")
    assert await ended(process) == 2
    assert "'b' is a second body" in shop.stderr


@on("sqlite")
async def test_health(pond: Millpond, shop: Shop) -> None:
    process = shop.start("shop:pond", "--health-port", "0", "--log-format", "json", "--graceful-timeout", "10m")

    def port() -> int | None:
        lines = [json.loads(line) for line in shop.stderr.splitlines()] if (shop.folder / "stderr").exists() else []
        return next((line["port"] for line in lines if "port" in line), None)

    at = f"http://127.0.0.1:{await until(port)}"
    assert await asked(f"{at}/live") == (200, {"live": True, "in_flight": 0})
    await until(lambda: _is(at, 200))
    assert (await asked(f"{at}/nothing"))[0] == 404
    assert (await asked(f"{at}/ready", method="POST"))[0] == 405
    await pond.publish("orders", {"n": 1, "waits for": "the word"})
    await until(shop.orders)
    assert (await asked(f"{at}/ready"))[1]["in_flight"] == 1
    process.terminate()
    await until(lambda: _is(at, 503))
    assert (await asked(f"{at}/live"))[0] == 200
    (shop.folder / "the word").touch()
    assert await ended(process) == 0
    assert await counts(pond, "orders") == {State.COMPLETED: 1}


async def _is(at: str, code: int) -> bool:
    return (await asked(f"{at}/ready"))[0] == code


async def asked(url: str, method: str = "GET") -> tuple[int, Any]:
    def ask() -> tuple[int, Any]:
        try:
            with urllib.request.urlopen(urllib.request.Request(url, method=method), timeout=SOON) as answer:
                return answer.status, json.load(answer)
        except urllib.error.HTTPError as e:
            with e:
                return e.code, json.load(e)

    return await asyncio.to_thread(ask)


@on("sqlite")
async def test_json_logs_tell_the_message(pond: Millpond, shop: Shop) -> None:
    id_ = await pond.publish("orders", {"n": 1}, headers={"correlation-id": "order-7"})
    process = shop.start("shop:pond", "--until-idle", "--log-format", "json")
    assert await ended(process) == 0
    (line,) = [entry for entry in map(json.loads, shop.stderr.splitlines()) if entry["logger"] == "shop"]
    assert line["message"].startswith("shipping") and line["level"] == "info"
    assert (line["queue"], line["message_id"], line["correlation_id"]) == ("orders", str(id_), "order-7")
    assert line["time"].endswith("+00:00")


@on("postgresql")
async def test_a_database_that_is_not_there(pond: Millpond, shop: Shop) -> None:
    shop.write("nowhere", "from millpond import Millpond\nfrom shop import ship\n" + NOWHERE)
    process = shop.start("nowhere:pond")
    assert await ended(process) == 1
    assert shop.stderr.splitlines()[-1].startswith("millpond: ")
    assert "Traceback" not in shop.stderr and "secret" not in shop.stderr


NOWHERE = """
pond = Millpond("postgresql://me:secret-word@127.0.0.1:1/x", reconnect_timeout=0.1)
pond.subscriber("orders")(ship)
"""


# --- what is wrong with a command ------------------------------------------------------------------------


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., str]]:
    """Runs a command in a folder of its own, and gives the one line that it says on its failure."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry])
    before = set(sys.modules)
    (tmp_path / "broken_app.py").write_text("import json\n1 / 0\n")
    (tmp_path / "needs_app.py").write_text("import not_installed_anywhere\n")
    (tmp_path / "good_app.py").write_text(
        "from millpond import Millpond\nqueue = Millpond('memory://')\nother = 3\n"
        "empty = Millpond('memory://')\n@queue.subscriber('a')\nasync def handle(body): ...\n"
    )
    yield lambda *arguments: said(arguments)
    for name in set(sys.modules) - before:
        del sys.modules[name]


def said(arguments: tuple[str, ...]) -> str:
    import io

    err = io.StringIO()
    with contextlib.redirect_stderr(err):
        code = command(["run", *arguments])
    text = err.getvalue()
    assert code == 2, text
    assert text.startswith("millpond: ") and text.count("\n") == 1
    return text


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["absent_app:pond"], "there is no module 'absent_app', here in"),
        (["absent_app.orders:pond"], "there is no module 'absent_app'"),
        (["good_app.orders"], "there is no module 'good_app.orders'"),
        (["broken_app"], "importing 'broken_app' failed: ZeroDivisionError"),
        (["needs_app"], "importing 'needs_app' failed: ModuleNotFoundError: No module named 'not_installed_anywhere'"),
        (["good_app"], "has no 'pond'; its ponds are: empty, queue"),
        (["good_app:other"], "good_app:other is no Millpond but a int"),
        (["good_app.py:queue"], "is a file"),
        ([":queue"], "no module's name"),
        (["good_app:queue", "--queues", "b"], "no subscriber serves the queue 'b'; those served are: a"),
        (["good_app:queue", "--queues", ","], "names no queue"),
        (["good_app:queue", "--workers", "0"], "--workers"),
        (["good_app:queue", "--graceful-timeout", "soon"], "no duration"),
        (["good_app:queue", "--log-format", "xml"], "--log-format"),
        (["good_app:queue", "--health-port", "70000"], "--health-port"),
        ([], "MODULE"),
    ],
)
def test_what_is_wrong_with_a_command(here: Callable[..., str], arguments: list[str], words: str) -> None:
    assert words in here(*arguments)


def test_a_pond_without_subscribers(here: Callable[..., str]) -> None:
    assert "good_app:empty has no subscriber" in here("good_app:empty")
