"""`millpond run` as it is used: real processes, real signals, SQLite and PostgreSQL."""

import asyncio
import contextlib
import json
import os
import signal
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from millpond import Millpond, State
from millpond.cli import run_command as command
from tests.triggers import execute
from tests.waiting import SOON, ended, is_alive, until
from tests.worker.conftest import counts, drained, on, row
from tests.worker.shop import Shop, observing

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


@pond.subscriber("block")
async def block(body: int, delivery: Delivery):
    note("blocks", delivery.claim.deliveries, delivery.claim.crashes)
    if not os.path.exists("open"):
        time.sleep(1000)


@pond.subscriber("die", max_crashes=10, lease=5)
async def die(body: int):
    note("dies", os.getpid())
    os._exit(9)
"""


@pytest.fixture
def shop(tmp_path: Path, url: str) -> Iterator[Shop]:
    shop = Shop(tmp_path, url, APP)
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


@on("sqlite")
async def test_a_signal_while_the_worker_is_made_stops_it(pond: Millpond, shop: Shop) -> None:
    """The pond reads its subscribers to make the worker: then the signal comes."""
    early = """
import signal
read, sent = pond.of_queues, []


def with_signal(queues):
    if signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL and not sent:
        sent.append(os.kill(os.getpid(), signal.SIGTERM))
    return read(queues)


pond.of_queues = with_signal
"""
    with (shop.folder / "shop.py").open("a") as file:
        file.write(early)
    process = shop.start("shop")
    assert await ended(process) == 0, shop.stderr
    assert "stopped" in shop.stderr


@pytest.mark.slow_on_servers
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


@pytest.mark.slow
@on("sqlite", "postgresql", "mariadb")
async def test_a_long_job_survives_deploys(pond: Millpond, shop: Shop) -> None:
    """Three orderly stops interrupt it. They are no crashes: it is no suspect, and the fourth worker completes it."""
    id_ = await pond.publish("orders", {"n": 1, "waits for": "the word"})
    for deploy in range(1, 5):
        process = shop.start("shop", "--queues", "orders", "--graceful-timeout", "200ms")
        await until(lambda deploy=deploy: len(shop.orders()) == deploy)  # type: ignore[misc]
        found = await row(pond, id_)
        assert (found.deliveries, found.attempts, found.crashes) == (deploy, 0, 0)
        if deploy == 4:
            (shop.folder / "the word").touch()
            await drained(pond, "orders")
        process.terminate()
        assert await ended(process) == 0, shop.stderr
    assert await counts(pond, "orders") == {State.COMPLETED: 1}
    assert len(shop.workers()) == 4, "no child process was started"


@on("sqlite")
async def test_sigterm_is_recorded_although_the_event_loop_is_blocked(pond: Millpond, shop: Shop) -> None:
    process = shop.start("shop", "--queues", "block")
    await pond.publish("block", 1)
    await until(lambda: ["blocks", "1", "0"] in shop.notes)
    process.terminate()
    await until(lambda: execute(shop.url, "SELECT stopping FROM millpond_worker") == [(1,)])
    assert "stopping:" not in shop.stderr


@pytest.mark.slow
@on("sqlite", "postgresql", "mariadb")
async def test_a_kill_after_sigterm_is_no_crash_although_the_event_loop_is_blocked(pond: Millpond, shop: Shop) -> None:
    process = shop.start("shop", "--queues", "block")
    await pond.publish("block", 1)
    await until(lambda: ["blocks", "1", "0"] in shop.notes)
    other = shop.start("shop", "--queues", "block")
    await observing(shop.url, 2)
    process.terminate()
    await until(lambda: execute(shop.url, "SELECT max(stopping) FROM millpond_worker") == [(1,)])
    assert "stopping:" not in shop.stderr
    (shop.folder / "open").touch()
    process.kill()
    await ended(process)
    await until(lambda: ["blocks", "2", "0"] in shop.notes)
    other.terminate()
    assert await ended(other) == 0, shop.stderr
    assert await counts(pond, "block") == {State.COMPLETED: 1}


@on("sqlite")
async def test_a_thread_that_hangs_does_not_keep_the_process(pond: Millpond, shop: Shop) -> None:
    process = shop.start("shop:pond", "--graceful-timeout", "100ms")
    id_ = await pond.publish("hang", 1)
    await until(lambda: ["hangs"] in shop.notes)
    process.terminate()
    assert await ended(process) == 0
    found = await row(pond, id_)
    assert (found.state, found.deliveries) == (State.PROCESSING, 1), "it comes back when its lease ends"
    assert "left behind" in shop.stderr


@pytest.mark.slow
@both
async def test_two_workers_one_killed(pond: Millpond, shop: Shop) -> None:
    """The worker is restarted; its messages are given back in about two seconds, and none is lost."""
    process = shop.start("shop:pond", "--workers", "2", "--log-format", "json")
    await until(lambda: len(shop.workers()) == 2)
    first, second = shop.workers()
    await asyncio.sleep(3)  # a reaper judges only after some seconds of uninterrupted connection
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
    """Workers stopped before they handled signals had nothing to finish: the exit code is 0."""
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
    at = f"http://127.0.0.1:{await until(lambda: _port(shop))}"
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


@on("sqlite")
async def test_health_on_another_address(pond: Millpond, shop: Shop) -> None:
    """For a manager of containers, which asks at the address of the container."""
    options = ["--health-port", "0", "--log-format", "json"]
    process = shop.start("shop:pond", "--health-host", "127.0.0.2", *options)
    port = await until(lambda: _port(shop))
    assert f"health at http://127.0.0.2:{port}/live" in shop.stderr
    assert (await asked(f"http://127.0.0.2:{port}/live"))[0] == 200
    with pytest.raises(urllib.error.URLError, match="refused"):
        await asked(f"http://127.0.0.1:{port}/live")
    process.terminate()
    assert await ended(process) == 0
    wrong = shop.start("shop:pond", "--health-host", "192.0.2.1", *options)
    assert await ended(wrong) == 1
    assert "--health-host 192.0.2.1 --health-port 0: " in shop.stderr


def _port(shop: Shop) -> int | None:
    """The port of the health endpoint, from JSON logs."""
    lines = [json.loads(line) for line in shop.stderr.splitlines()] if (shop.folder / "stderr").exists() else []
    return next((line["port"] for line in lines if "port" in line), None)


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


# --- wrong commands -----------------------------------------------------------------------------------------


BROKEN = {
    "broken_app": "import json\n1 / 0\n",
    "needs_app": "\nimport not_installed_anywhere\n",
    "value_app": "\n\nLIMIT = int('ten')\n",
    "in_library_app": "import json\n\njson.loads('{')\n",
    "imports_app": "import broken_app\n",
    "syntax_app": "def f():\n    return (\n",
    "option_app": "from millpond import Millpond\npond = Millpond('memory://', nonsense=1)\n",
    "decorator_app": "from millpond import Millpond\npond = Millpond('memory://')\n\n@pond.subscriber\n"
    "async def ship(order): ...\n",
    "secret_app": "from millpond import Millpond\nraise ValueError('postgresql://u:hunter22@h/d')\n",
}


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., str]]:
    """Run a command in an empty folder; returns the single line of its error."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry])
    before = set(sys.modules)
    for name, code in BROKEN.items():
        (tmp_path / f"{name}.py").write_text(code)
    (tmp_path / "good_app.py").write_text(
        "from millpond import Millpond\nqueue = Millpond('memory://')\nother = 3\n"
        "empty = Millpond('memory://')\n@queue.subscriber('a')\nasync def handle(body): ...\n"
    )
    yield lambda *arguments: error_line(arguments)
    for name in set(sys.modules) - before:
        del sys.modules[name]


def error_line(arguments: tuple[str, ...]) -> str:
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
        (["absent_app:pond"], "there is no module 'absent_app', neither in"),
        (["absent_app.orders:pond"], "there is no module 'absent_app'"),
        (["good_app.orders"], "there is no module 'good_app.orders'"),
        (["broken_app"], "importing 'broken_app' failed at broken_app.py, line 2: ZeroDivisionError: division by zero"),
        (
            ["needs_app"],
            "failed at needs_app.py, line 2: ModuleNotFoundError: No module named 'not_installed_anywhere'",
        ),
        (["value_app"], "failed at value_app.py, line 3: ValueError: invalid literal for int() with base 10: 'ten'"),
        (["in_library_app"], "failed at in_library_app.py, line 3: JSONDecodeError: Expecting property name"),
        (["imports_app"], "importing 'imports_app' failed at broken_app.py, line 2: ZeroDivisionError"),
        (["syntax_app"], "importing 'syntax_app' failed at syntax_app.py, line 2: SyntaxError: '(' was never closed"),
        (["option_app"], "failed at option_app.py, line 2: InvalidOption: unknown option 'nonsense'"),
        (
            ["decorator_app"],
            "failed at decorator_app.py, line 4: InvalidOption: a subscriber needs the name of its queue",
        ),
        (["good_app"], "has no 'pond'; its ponds are: empty, queue"),
        (["good_app:other"], "good_app:other is not a Millpond but a int"),
        (["good_app.py:queue"], "is a file"),
        ([":queue"], "'' is not the name of a module"),
        ([".good_app"], "'.good_app' is not the name of a module"),
        (["good_app:queue", "--queues", "b"], "no subscriber serves the queue 'b'; those served are: a"),
        (["good_app:queue", "--queues", ","], "names no queue"),
        (["good_app:queue", "--workers", "0"], "--workers"),
        (["good_app:queue", "--workers", "2"], "SHARED): leave --workers out, or give the pond the URL of a database"),
        (["good_app:queue", "--graceful-timeout", "soon"], "not a duration"),
        (["good_app:queue", "--log-format", "xml"], "--log-format"),
        (["good_app:queue", "--health-port", "70000"], "--health-port"),
        (["good_app:queue", "--health-host", "::1"], "--health-host needs --health-port"),
        ([], "MODULE"),
    ],
)
def test_wrong_commands(here: Callable[..., str], arguments: list[str], words: str) -> None:
    assert words in here(*arguments)


@pytest.mark.parametrize("arguments", [["--debug", "run", "value_app"], ["run", "value_app", "--debug"]])
def test_debug_prints_the_traceback(here: Callable[..., str], capsys: Any, arguments: list[str]) -> None:
    assert command(arguments) == 2
    error = capsys.readouterr().err
    assert "Traceback" in error and "LIMIT = int('ten')" in error
    assert error.splitlines()[-1].startswith("millpond: importing 'value_app' failed at value_app.py, line 3")


def test_debug_may_be_the_text_of_a_message(here: Callable[..., str], capsys: Any) -> None:
    assert command(["publish", "q", "--text", "--url", "sqlite:///q.db", "--", "--debug"]) == 1
    assert "Traceback" not in capsys.readouterr().err


def test_a_pond_without_subscribers(here: Callable[..., str]) -> None:
    assert "good_app:empty has no subscriber" in here("good_app:empty")


@on("sqlite")
async def test_a_stuck_worker_is_not_ready_and_may_end(pond: Millpond, shop: Shop) -> None:
    shop.write(
        "stuck",
        """
        import time
        from millpond import Millpond

        pond = Millpond({url!r})


        @pond.subscriber("hang", max_workers=1, timeout=0.2, lease=3)
        def hang(body: int):
            time.sleep(1000)
        """,
    )
    process = shop.start(
        "stuck:pond", "--health-port", "0", "--log-format", "json", "--end-when-stuck", "--graceful-timeout", "100ms"
    )
    at = f"http://127.0.0.1:{await until(lambda: _port(shop))}"
    await until(lambda: _is(at, 200))
    await pond.publish("hang", 1)
    await until(lambda: _is(at, 503))
    assert (await asked(f"{at}/ready"))[1]["obstacle"] == "all handlers of hang hang beyond their timeout"
    assert await ended(process) == 1
    assert "all 1 handlers of hang have hung for longer than a lease" in shop.stderr
