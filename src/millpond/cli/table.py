"""Plain tables. Text from messages is printed literally: no markup, no control characters."""

import json
import shutil
import sys
from collections.abc import Container, Iterable, Sequence
from typing import Any

from millpond.clock import as_datetime, utc_text

WIDE = 200
"""Width in columns of reports when the output is not a terminal."""
_GAP = "  "
_WHOLE = 36
"""Characters of an id, which is copied from here: texts of this length are whole, times too."""
_LEAST = 20
"""Characters that a terminal shows of a longer name at least."""
_LEAST_LAST = 12
_BOLD, _PLAIN = "\x1b[1m", "\x1b[0m"


def table(heads: Sequence[str], rows: Sequence[Sequence[str]], *, right: Iterable[int], empty: str = "") -> None:
    """Print rows under heads, some columns right-aligned; without rows the text `empty`.

    A terminal that is too narrow shows less of the last column, then of long names. Numbers, times and ids stay whole.
    """
    if not rows:
        print(empty)
        return
    from rich.cells import cell_len  # imported here: most commands print one line

    right = set(right)
    on_terminal = sys.stdout.isatty()
    widths = [max(map(cell_len, column)) for column in zip(heads, *rows, strict=True)]
    if on_terminal:
        widths = _fitting(widths, heads, right, shutil.get_terminal_size().columns)

    def line(cells: Sequence[str]) -> str:
        texts = []
        for n, (cell, width) in enumerate(zip(cells, widths, strict=True)):
            text = cell
            if cell_len(cell) > width:
                text = f"{cell[: width - 1]}…" if n == len(widths) - 1 else shortened(cell, width)
            space = " " * (width - cell_len(text))
            texts.append(space + text if n in right else text + space)
        return _GAP.join(texts).rstrip()

    head = line(heads)
    print(f"{_BOLD}{head}{_PLAIN}" if on_terminal else head)
    for row in rows:
        print(line(row))


def _fitting(widths: Sequence[int], heads: Sequence[str], right: Container[int], most: int) -> list[int]:
    """Widths that fit in a terminal, if they can."""
    fitting = list(widths)
    names = [n for n, width in enumerate(widths) if n not in right and width > _WHOLE]
    last = len(widths) - 1
    # The last column is a free text: it gives way first.
    for n in (last, *sorted(set(names) - {last}, key=lambda n: -widths[n])):
        excess = sum(fitting) + len(_GAP) * last - most
        least = max(len(heads[n]), _LEAST_LAST if n == last else _LEAST)
        if excess > 0 and n not in right:
            fitting[n] = min(fitting[n], max(least, fitting[n] - excess))
    return fitting


def shortened(name: str, most: int | None) -> str:
    """Both ends of a name that is too long.

    >>> shortened("orders.of.customers.in.the.far.north", 16)
    'orders.o…r.north'
    """
    if most is None or len(name) <= most:
        return name
    return f"{name[: most // 2]}…{name[len(name) - (most - most // 2 - 1) :]}"


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
