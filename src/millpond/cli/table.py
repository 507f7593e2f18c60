"""Plain tables. Text from messages is printed literally: no markup, no control characters."""

import json
import shutil
import sys
from bisect import bisect_right
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
    right = set(right)
    on_terminal = sys.stdout.isatty()
    widths = [max(map(columns, column)) for column in zip(heads, *rows, strict=True)]
    if on_terminal:
        widths = _fitting(widths, heads, right, shutil.get_terminal_size().columns)

    def line(cells: Sequence[str]) -> str:
        texts = []
        for n, (cell, width) in enumerate(zip(cells, widths, strict=True)):
            text = cell
            if columns(cell) > width:
                text = f"{beginning(cell, width - 1)}…" if n == len(widths) - 1 else shortened(cell, width)
            texts.append(padded(text, width, right=n in right))
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


def columns(text: str) -> int:
    """Columns of a terminal that a text takes: letters of some languages, and emoji, take two."""
    from rich.cells import cell_len  # imported here: most commands print one line

    return cell_len(text)


def beginning(text: str, most: int) -> str:
    """As many characters as fit into so many columns."""
    return text[: bisect_right(range(1, len(text) + 1), most, key=lambda n: columns(text[:n]))]


def padded(text: str, width: int, *, right: bool) -> str:
    space = " " * (width - columns(text))
    return space + text if right else text + space


def shortened(name: str, most: int) -> str:
    """Both ends of a name that takes more columns.

    >>> shortened("orders.of.customers.in.the.far.north", 16)
    'orders.o…r.north'
    """
    if columns(name) <= most:
        return name
    room = most - most // 2 - 1
    end = bisect_right(range(1, len(name) + 1), room, key=lambda n: columns(name[-n:]))
    return f"{beginning(name, most // 2)}…{name[len(name) - end :]}"


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
