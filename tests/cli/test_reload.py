"""`millpond run --reload`: a change of a file starts the worker again; an error in it waits for the next change."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.waiting import SOON, until

SHOP = """
import os, pathlib
from millpond import Millpond
pond = Millpond("sqlite:///shop.db")
{problem}
@pond.subscriber("q")
def handle(body: int) -> None: ...
@pond.on_start
def started() -> None:
    pathlib.Path("{version}.group").write_text(str(os.getpgrp()))
    pathlib.Path("{version}").touch()
"""


@pytest.fixture
def command(tmp_path: Path) -> Iterator["subprocess.Popen[str]"]:
    (tmp_path / "shop.py").write_text(SHOP.format(version="first", problem=""))
    process = subprocess.Popen(
        [sys.executable, "-m", "millpond", "run", "shop", "--reload"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    yield process
    process.kill()
    process.communicate()


async def test_a_change_starts_the_worker_again(command: "subprocess.Popen[str]", tmp_path: Path) -> None:
    await until((tmp_path / "first").exists)
    (tmp_path / "shop.py").write_text(SHOP.format(version="second", problem=""))
    await until((tmp_path / "second").exists)
    (tmp_path / "shop.py").write_text(SHOP.format(version="third", problem="1 / 0"))
    assert command.stderr is not None
    for line in command.stderr:
        if "shop.py, line 5" in line:
            assert "ZeroDivisionError" in line
            break
    (tmp_path / "shop.py").write_text(SHOP.format(version="fourth", problem=""))
    await until((tmp_path / "fourth").exists)
    command.send_signal(signal.SIGTERM)
    assert command.wait(SOON) == 0
    assert not (tmp_path / "third").exists()


async def test_ctrl_c_reaches_the_worker_once(command: "subprocess.Popen[str]", tmp_path: Path) -> None:
    """A terminal sends it to the whole group of the command; a second signal would interrupt handlers."""
    await until((tmp_path / "first").exists)
    assert int((tmp_path / "first.group").read_text()) != os.getpgid(command.pid)
    os.killpg(command.pid, signal.SIGINT)
    assert command.wait(SOON) == 0


async def test_the_end_of_the_terminal_ends_the_worker(command: "subprocess.Popen[str]", tmp_path: Path) -> None:
    await until((tmp_path / "first").exists)
    worker = int((tmp_path / "first.group").read_text())
    os.killpg(command.pid, signal.SIGHUP)
    assert command.wait(SOON) == 0
    with pytest.raises(ProcessLookupError):
        os.killpg(worker, 0)
