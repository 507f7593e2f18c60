"""Plain tables. Text from messages is printed literally: no markup, no control characters."""

import json
import sys
from collections.abc import Iterable, Sequence
from typing import Any

from millpond.clock import as_datetime, utc_text

WIDE = 200
"""Width in columns when the output is not a terminal."""


def table(heads: Sequence[str], rows: Sequence[Sequence[str]], *, right: Iterable[int], empty: str = "") -> None:
    """Print rows under heads, some columns right-aligned; without rows the text `empty`."""
    if not rows:
        print(empty)
        return
    from rich.console import Console  # imported here: rich is slow to import, and most commands print one line
    from rich.table import Table
    from rich.text import Text

    right = set(right)
    grid = Table(box=None, pad_edge=False, header_style="bold")
    for n, head in enumerate(heads):
        last = n == len(heads) - 1
        grid.add_column(
            head, justify="right" if n in right else "left", no_wrap=True, overflow="ellipsis" if last else "fold"
        )
    for row in rows:
        grid.add_row(*(Text(cell) for cell in row))
    Console(width=None if sys.stdout.isatty() else WIDE, highlight=False).print(grid)


def when(us: int | None) -> str | None:
    """
    >>> when(1_896_076_800_000_000)
    '2030-01-31T08:00:00Z'
    """
    return None if us is None else utc_text(as_datetime(us), "seconds")


def plain(text: str) -> str:
    r"""Escape characters that would control a terminal.

    >>> plain("red\x1b[31m")
    'red\\x1b[31m'
    """
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def short(value: Any, limit: int = 80) -> str:
    text = plain(value if isinstance(value, str) else json.dumps(value, ensure_ascii=False))
    return text if len(text) <= limit else text[: limit - 1] + "…"
