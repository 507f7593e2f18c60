"""Output of the demo: steps, lines, and a progress bar, or a line every two seconds without a terminal."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

from millpond.clock import monotonic

_EVERY = 2.0
"""Seconds between two progress lines without a terminal."""

Update = Callable[[int, str], None]
"""Takes the number of finished messages and a status text."""


class Screen:
    def __init__(self) -> None:
        self.console = Console(highlight=False, soft_wrap=True)
        self._step = 0
        self._began = monotonic()

    @property
    def seconds(self) -> float:
        """Seconds since the demo began."""
        return monotonic() - self._began

    def step(self, title: str) -> None:
        self._step += 1
        self.console.print(f"\n[bold]{self._step}. {title}[/bold]")

    def print(self, text: str = "") -> None:
        self.console.print(f"   {text}" if text else "", markup=False)

    def notice(self, text: str) -> None:
        """Print a highlighted line."""
        self.console.print(f"   {text}", style="bold yellow", markup=False)

    @contextmanager
    def waiting(self, text: str) -> Iterator[None]:
        """Show a status while a call runs for some seconds without output."""
        if self.console.is_terminal:
            with self.console.status(f"{text} …"):
                yield
        else:
            self.print(f"{text} …")
            yield

    @contextmanager
    def bar(self, total: int) -> Iterator[Update]:
        if self.console.is_terminal:
            columns = (TextColumn(" "), BarColumn(14), MofNCompleteColumn(), TextColumn("{task.description}"))
            with Progress(*columns, console=self.console) as progress:
                task = progress.add_task("", total=total)
                yield lambda done, text: progress.update(task, completed=done, description=text)
            return
        last = monotonic()

        def update(done: int, text: str) -> None:
            nonlocal last
            if done == total or monotonic() - last >= _EVERY:
                last = monotonic()
                self.print(f"{done:,} of {total:,}  {text}")

        yield update
