"""Tables for people. What messages hold is shown as it is, never obeyed: no markup, no control characters."""

import json
import sys
from collections.abc import Iterable, Sequence
from datetime import datetime
from typing import Any

WIDE = 200
"""Columns when nobody's terminal says how many there are."""


def table(heads: Sequence[str], rows: Sequence[Sequence[str]], *, right: Iterable[int] = ()) -> None:
    from rich.console import Console  # here, since most commands print a line and rich takes its time
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


def when(moment: datetime) -> str:
    """
    >>> from datetime import UTC
    >>> when(datetime(2030, 1, 31, 8, tzinfo=UTC))
    '2030-01-31T08:00:00Z'
    """
    return moment.isoformat(timespec="seconds").replace("+00:00", "Z")


def plain(text: str) -> str:
    r"""Text that does nothing to a terminal.

    >>> plain("red\x1b[31m")
    'red\\x1b[31m'
    """
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def short(value: Any, limit: int = 80) -> str:
    text = plain(value if isinstance(value, str) else json.dumps(value, ensure_ascii=False))
    return text if len(text) <= limit else text[: limit - 1] + "…"
