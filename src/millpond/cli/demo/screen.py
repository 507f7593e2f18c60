"""What the viewer sees: steps, lines, and a bar that moves on a terminal or a line now and then elsewhere."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

from millpond.clock import monotonic

_EVERY = 2.0
"""Seconds between two lines where nothing moves."""

Update = Callable[[int, str], None]
"""So much is done, and what there is to say of it."""


class Screen:
    def __init__(self, console: Console | None = None) -> None:
        self.console = console or Console(highlight=False, soft_wrap=True)
        self._step = 0
        self._began = monotonic()

    @property
    def seconds(self) -> float:
        """Since the demo began."""
        return monotonic() - self._began

    def step(self, title: str) -> None:
        self._step += 1
        self.console.print(f"\n[bold]{self._step}. {title}[/bold]")

    def say(self, text: str = "") -> None:
        self.console.print(f"   {text}" if text else "", markup=False)

    def notice(self, text: str) -> None:
        """What nobody should miss."""
        self.console.print(f"   {text}", style="bold yellow", markup=False)

    @contextmanager
    def waiting(self, text: str) -> Iterator[None]:
        """Something that takes some seconds and tells nothing meanwhile."""
        if self.console.is_terminal:
            with self.console.status(f"{text} …"):
                yield
        else:
            self.say(f"{text} …")
            yield

    @contextmanager
    def bar(self, total: int) -> Iterator[Update]:
        if self.console.is_terminal:
            columns = (TextColumn(" "), BarColumn(14), MofNCompleteColumn(), TextColumn("{task.description}"))
            with Progress(*columns, console=self.console) as progress:
                task = progress.add_task("", total=total)
                yield lambda done, text: progress.update(task, completed=done, description=text)
            return
        told = monotonic()

        def tell(done: int, text: str) -> None:
            nonlocal told
            if done == total or monotonic() - told >= _EVERY:
                told = monotonic()
                self.say(f"{done:,} of {total:,}  {text}")

        yield tell
