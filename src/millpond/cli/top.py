"""`millpond top`: queues and workers, live in a terminal."""

import asyncio
import contextlib
import os
import shutil
import sys
from collections.abc import AsyncIterator, Iterator, Sequence
from typing import Annotated

import typer

from millpond.cli.app import command
from millpond.cli.table import beginning, columns, padded, plain, shortened
from millpond.clock import monotonic
from millpond.control import Control, QueueView, StreamView
from millpond.errors import StoreError
from millpond.message import State
from millpond.seam.transport import Capability
from millpond.seam.workers import WorkerStatus

_ENTER, _LEAVE = "\x1b[?1049h\x1b[?25l", "\x1b[?25h\x1b[?1049l"
_HOME, _REST_OF_LINE, _REST_OF_SCREEN = "\x1b[H", "\x1b[K", "\x1b[J"
_BOLD, _PLAIN = "\x1b[1m", "\x1b[0m"
_LINES = 24
_LEAST = 16
"""Columns of a long name that are shown at least."""
_HEADS = ("queue", "waiting", "running", "failed", "done/s", "fail/s", "oldest due", "")
_WORKER_HEADS = ("worker", "state", "holds", "last beat", "queues")
_STREAM_HEADS = ("stream", "holds", "for", "waiting behind", "queues")


@command("top", Control)
async def top(
    control: Control,
    interval: Annotated[float, typer.Option(min=0.2, help="Seconds between two refreshes.")] = 2.0,
    once: Annotated[bool, typer.Option("--once", help="Print the screen once and end.")] = False,
) -> None:
    """Watch queues, workers and streams in a terminal; q ends it."""
    if once or not sys.stdout.isatty():
        print("\n".join(line for line, _ in await _screen_lines(control)))
        return
    with _screen(), _keys() as ended:
        async for lines in _refreshes(control, interval, ended):
            _draw(lines)


async def _refreshes(control: Control, interval: float, ended: asyncio.Event) -> AsyncIterator[list[tuple[str, bool]]]:
    """Lines of each refresh, until q is pressed. A database that is away is shown, and asked again."""
    lines: list[tuple[str, bool]] = []
    while not ended.is_set():
        started = monotonic()
        try:
            lines = await _screen_lines(control, shutil.get_terminal_size((80, _LINES)).columns)
        except StoreError as e:
            lines = [(f"no answer: {plain(str(e))}", True), *lines[1:]]
        yield lines
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(ended.wait(), max(0.05, interval - (monotonic() - started)))


async def _screen_lines(control: Control, width: int | None = None) -> list[tuple[str, bool]]:
    """Lines, each with whether it is a heading. Names give way to numbers within the width of a terminal."""
    views = sorted(await control.overview(), key=_urgency, reverse=True)
    waiting = sum(_waiting(view) for view in views)
    rates = sum(view.completed_per_second for view in views), sum(view.failed_per_second for view in views)
    queues = f"{len(views):,} queue{'' if len(views) == 1 else 's'}"
    title = f"{queues}   {waiting:,} waiting   {rates[0]:.1f} done/s   {rates[1]:.1f} failed/s"
    title += "" if width is None else "   q ends"
    lines = [(title, True), ("", False), *_table(_HEADS, [_queue(view) for view in views], width)]
    if Capability.PRESENCE in control.capabilities:
        workers = await control.workers.status()
        rows = [_worker(status) for status in workers]
        lines += [("", False), *(_table(_WORKER_HEADS, rows, width) if rows else [("no worker runs", False)])]
    if Capability.STREAM_STATUS in control.capabilities and (streams := await control.stream_views()):
        lines += [("", False), *_table(_STREAM_HEADS, [_stream(view) for view in streams], width)]
    return lines


def _urgency(view: QueueView) -> tuple[float, int]:
    return view.oldest_for or 0.0, _waiting(view)


def _waiting(view: QueueView) -> int:
    return sum(view.stats.counts.get(state, 0) for state in (State.PENDING, State.RETRYABLE))


def _queue(view: QueueView) -> list[str]:
    counts = view.stats.counts
    return [
        plain(view.stats.queue),
        f"{_waiting(view):,}",
        f"{counts.get(State.PROCESSING, 0):,}",
        f"{counts.get(State.FAILED, 0):,}",
        f"{view.completed_per_second:.1f}",
        f"{view.failed_per_second:.1f}",
        "" if view.oldest_for is None else f"{view.oldest_for:.0f} s",
        "paused" if view.stats.paused else "",
    ]


def _worker(status: WorkerStatus) -> list[str]:
    state = "silent" if not status.beats else "stopping" if status.stopping else "running"
    queues = "not recorded" if status.queues is None else ", ".join(map(plain, status.queues))
    return [plain(status.name), state, f"{status.held:,}", f"{status.silent_for:.0f} s", queues]


def _stream(view: StreamView) -> list[str]:
    held_for, waiting = view.status.held_for, view.waiting
    return [
        plain(view.status.name),
        f"{view.status.held:,}",
        "" if held_for is None else f"{held_for:.0f} s",
        "not known" if waiting is None else f"{waiting:,}{'' if view.complete else '+'}",
        ", ".join(map(plain, view.queues)),
    ]


def _table(heads: Sequence[str], rows: list[list[str]], width: int | None) -> list[tuple[str, bool]]:
    """Columns as wide as their longest text; the first and last are aligned to the left."""
    if width is not None:  # the last column may leave the screen
        others = sum(2 + max(columns(row[n]) for row in (list(heads), *rows)) for n in range(1, len(heads) - 1))
        rows = [[shortened(row[0], max(_LEAST, width - others)), *row[1:]] for row in rows]
    widths = [max(columns(row[n]) for row in (list(heads), *rows)) for n in range(len(heads))]
    last = len(heads) - 1

    def line(cells: Sequence[str]) -> str:
        return "  ".join(
            padded(cell, width, right=n not in (0, last))
            for n, (cell, width) in enumerate(zip(cells, widths, strict=True))
        ).rstrip()

    return [(line(heads), True), *((line(row), False) for row in rows)]


def _draw(lines: list[tuple[str, bool]]) -> None:
    width, height = shutil.get_terminal_size((80, _LINES))
    shown = lines[: height - 1]
    if len(lines) > len(shown):
        shown[-1] = (f"… {len(lines) - len(shown) + 1} more lines", False)
    text = "".join(
        f"{_BOLD if bold else ''}{beginning(line, width)}{_PLAIN if bold else ''}{_REST_OF_LINE}\r\n"
        for line, bold in shown
    )
    sys.stdout.write(f"{_HOME}{text}{_REST_OF_SCREEN}")
    sys.stdout.flush()


@contextlib.contextmanager
def _screen() -> Iterator[None]:
    """A second screen of the terminal; the first one comes back unchanged."""
    sys.stdout.write(_ENTER)
    try:
        yield
    finally:
        sys.stdout.write(_LEAVE)
        sys.stdout.flush()


@contextlib.contextmanager
def _keys() -> Iterator[asyncio.Event]:
    """An event that is set when q is pressed."""
    ended = asyncio.Event()
    if not sys.stdin.isatty():
        yield ended
        return
    import termios  # imported here: not every system has them
    import tty

    number = sys.stdin.fileno()
    before = termios.tcgetattr(number)
    loop = asyncio.get_running_loop()

    def pressed() -> None:
        keys = os.read(number, 64)
        if not keys or b"q" in keys.lower():
            ended.set()

    tty.setcbreak(number)
    loop.add_reader(number, pressed)
    try:
        yield ended
    finally:
        loop.remove_reader(number)
        termios.tcsetattr(number, termios.TCSADRAIN, before)
