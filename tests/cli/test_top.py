"""`millpond top` in a real terminal, and the completion of shells."""

from __future__ import annotations

import os
import pty
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from uuid import UUID

import pytest
from rich.cells import cell_len

from millpond import Millpond
from tests.cli.conftest import Cli


@pytest.fixture
def url(sqlite_url: str) -> str:
    pond = Millpond(sqlite_url, migrate=True)
    for number in range(3):
        pond.publish_sync("orders", number)
    pond.publish_sync("odd\x1b[31m", 1)
    pond.close_sync()
    return sqlite_url


def test_one_look_is_printed_without_a_terminal(cli: Cli, url: str) -> None:
    out = cli.ok("top", "--url", url).out
    assert out.startswith("2 queues   4 waiting") and "no worker runs" in out and "\x1b" not in out
    (line,) = [line for line in out.splitlines() if line.startswith("orders")]
    assert line.split()[1:4] == ["3", "0", "0"]


@contextmanager
def terminal(*arguments: str, columns: int = 100) -> Iterator[tuple[subprocess.Popen[bytes], int]]:
    """The command with a terminal; its end of the terminal is read and written."""
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "millpond", *arguments],
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        start_new_session=True,
        # A run in the background of a shell ignores the signal, and its processes would too.
        preexec_fn=partial(signal.signal, signal.SIGINT, signal.SIG_DFL),
        env={**os.environ, "COLUMNS": str(columns), "LINES": "30"},
    )
    os.close(theirs)
    try:
        yield process, ours
    finally:
        process.kill()
        process.wait()
        os.close(ours)


def shown(ours: int, wanted: str, before: str = "") -> str:
    """Read until the terminal has shown the text."""
    text = before
    while wanted not in text:
        assert select.select([ours], [], [], 60)[0], text
        text += os.read(ours, 65536).decode()
    return text


def test_the_view_is_live_and_q_ends_it(url: str) -> None:
    with terminal("top", "--url", url, "--interval", "0.2") as (process, ours):
        text = shown(ours, "4 waiting")
        assert text.index("\x1b[?1049h") < text.index("orders") and "\\x1b[31m" in text
        pond = Millpond(url)
        pond.publish_sync("orders", 4)
        pond.close_sync()
        shown(ours, "5 waiting")
        os.write(ours, b"q")
        shown(ours, "\x1b[?1049l")
        assert process.wait(60) == 0


def test_numbers_stay_on_the_screen_beside_long_names(cli: Cli, url: str) -> None:
    name = "long-" * 50 + "end"
    pond = Millpond(url)
    pond.publish_many_sync(name, list(range(123)))
    pond.close_sync()
    with terminal("top", "--url", url, columns=80) as (process, ours):
        line = next(line for line in shown(ours, "q ends\x1b[0m", shown(ours, "-end")).splitlines() if "-end" in line)
        assert "long-" in line and "…" in line and " 123 " in line and line.split()[-2].isdecimal()
        os.write(ours, b"q")
        shown(ours, "\x1b[?1049l")
        process.wait(60)
    for command in (("top", "--once"), ("stats",)):
        (row,) = [line for line in cli.ok(*command, "--url", url).out.splitlines() if line.startswith("long-")]
        assert row.split()[:2] == [name, "123"]
    with terminal("stats", "--url", url) as (process, ours):
        heads, row = shown(ours, "-end", shown(ours, "123")).splitlines()[:2]
        assert "oldest due" in heads and "long-long-" in row and "…" in row
        assert len(row) <= 100


def test_wide_characters_fit_in_a_terminal(url: str) -> None:
    """Each takes two columns"""
    pond = Millpond(url)
    pond.publish_sync("注文" * 60, 1)
    pond.close_sync()
    with terminal("stats", "--url", url) as (_, ours):
        row = next(line for line in shown(ours, "\n", shown(ours, "…")).splitlines() if "…" in line)
        assert cell_len(row) <= 100 and row.startswith("注文") and "注文 " in row
    with terminal("top", "--url", url, columns=80) as (process, ours):
        lines = shown(ours, "q ends\x1b[0m", shown(ours, "…")).replace("\x1b[H", "\n").splitlines()
        (row, short) = (next(line.split("\x1b[K")[0] for line in lines if name in line) for name in ("…", "orders"))
        assert cell_len(row) <= 80 and "注文 " in row
        ends = [cell_len(line[: line.index(waiting) + 1]) for line, waiting in ((row, " 1 "), (short, " 3 "))]
        assert ends[0] == ends[1]
        os.write(ours, b"q")
        shown(ours, "\x1b[?1049l")
        process.wait(60)


def test_ids_are_whole_in_a_narrow_terminal(url: str) -> None:
    with terminal("list", "orders", "--url", url, columns=60) as (_, ours):
        for row in shown(ours, "\n", shown(ours, "PENDING")).splitlines():
            if "PENDING" in row:
                UUID(row.split()[0])


def test_ctrl_c_restores_the_terminal(url: str) -> None:
    with terminal("top", "--url", url) as (process, ours):
        text = shown(ours, "4 waiting")
        process.send_signal(signal.SIGINT)
        shown(ours, "\x1b[?1049l", text)
        process.wait(60)


@pytest.mark.parametrize(
    ("words", "found"), [("millpond to", {"top", "tokens"}), ("millpond serve --roo", {"--root-path"})]
)
def test_shells_complete_commands_and_options(words: str, found: set[str]) -> None:
    environment = {
        **os.environ,
        "_MILLPOND_COMPLETE": "complete_bash",
        "COMP_WORDS": words,
        "COMP_CWORD": str(len(words.split()) - 1),
    }
    done = subprocess.run(
        [sys.executable, "-m", "millpond"], env=environment, capture_output=True, text=True, check=True
    )
    assert set(done.stdout.split()) == found
