"""Figures for people and for programs: a table on the terminal, JSON lines, a table in a document."""

import json
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from bench.measure import Measurement

_HEADS = ("measurement", "what", "against", "Millpond/s", "other/s", "result", "rounds", "bar", "")


def print_table(console: Console, measurements: Sequence[Measurement]) -> None:
    table = Table(title="Millpond measured: medians of rounds in which both sides take turns")
    # What the names say is for the document; here it would not fit into a line.
    shown = [n for n, head in enumerate(_HEADS) if head not in ("what", "against")]
    for n in shown:
        table.add_column(_HEADS[n], justify="left" if n == 0 else "right")
    for m in measurements:
        cells = _cells(m)
        table.add_row(*(cells[n] for n in shown), style={True: "green", False: "red", None: ""}[m.met])
    console.print(table)


def write_json(path: Path, measurements: Sequence[Measurement]) -> None:
    """One line for each, with everything that is known of it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as file:
        for m in measurements:
            file.write(json.dumps({**vars(m), "met": m.met}) + "\n")


def marks(table: str = "bench") -> tuple[str, str]:
    """Between which a table stands in a document."""
    return f"<!-- {table}: begin -->", f"<!-- {table}: end -->"


def write_markdown(
    path: Path, measurements: Sequence[Measurement], facts: Sequence[str], *, table: str = "bench"
) -> None:
    """Replace what stands between the marks of a document."""
    begin, end = marks(table)
    text = path.read_text()
    before, found, rest = text.partition(begin)
    _, found_end, after = rest.partition(end)
    if not (found and found_end):
        raise SystemExit(f"{path} has no {begin} … {end}")
    lines = [
        "| " + " | ".join(_HEADS) + " |",
        "|" + "---|" * len(_HEADS),
        *("| " + " | ".join(_cells(m)) + " |" for m in measurements),
        "",
        *(f"- {fact}" for fact in facts),
    ]
    path.write_text(before + begin + "\n" + "\n".join(lines) + "\n" + end + after)


def _cells(m: Measurement) -> list[str]:
    ours, theirs = m.per_second.get("ours"), m.per_second.get("theirs")
    bar = f"≥ {m.at_least:g}" if m.at_least is not None else f"≤ {m.at_most:g}" if m.at_most is not None else ""
    value = f"{m.value:.2f}" if m.unit == "ratio" else f"{m.value:.0f} {m.unit}"
    spread = f"{m.low:.2f}-{m.high:.2f}" if m.unit == "ratio" else ""
    return [
        m.name,
        m.what,
        m.against,
        f"{ours:,.0f}" if ours else "",
        f"{theirs:,.0f}" if theirs else "",
        value,
        spread,
        bar,
        {True: "✓", False: "✗", None: ""}[m.met],
    ]
