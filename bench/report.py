"""Output of measurements: a table on the terminal, JSON lines, a table in a document."""

import json
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from bench.measure import Measurement

_HEADS = ("measurement", "what", "against", "Millpond/s", "other/s", "result", "rounds", "bar", "", "measured")


def print_table(console: Console, measurements: Sequence[Measurement]) -> None:
    table = Table(title="Millpond measured: medians of rounds in which both sides alternate")
    # Some columns are for the document; here they would not fit into a line.
    shown = [n for n, head in enumerate(_HEADS) if head not in ("what", "against", "measured")]
    for n in shown:
        table.add_column(_HEADS[n], justify="left" if n == 0 else "right")
    for m in measurements:
        cells = _cells(m)
        table.add_row(*(cells[n] for n in shown), style={True: "green", False: "red", None: ""}[m.met])
    console.print(table)


def write_json(path: Path, measurements: Sequence[Measurement]) -> None:
    """Write one line per measurement, with all its facts."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as file:
        for m in measurements:
            file.write(json.dumps({**vars(m), "met": m.met}) + "\n")


def marks(table: str = "bench") -> tuple[str, str]:
    """The comments before and after a table in a document."""
    return f"<!-- {table}: begin -->", f"<!-- {table}: end -->"


def write_markdown(
    path: Path,
    measurements: Sequence[Measurement],
    facts: Sequence[str],
    *,
    table: str = "bench",
    others: bool = False,
) -> None:
    """Replace the text between the marks of a document. `others`: keep its facts and the rows of other measurements."""
    begin, end = marks(table)
    text = path.read_text()
    before, found, rest = text.partition(begin)
    old, found_end, after = rest.partition(end)
    if not (found and found_end):
        raise SystemExit(f"{path} has no {begin} … {end}")
    rows = ["| " + " | ".join(_cells(m)) + " |" for m in measurements]
    if others:
        lines = old.splitlines()
        known = {_name(line): line for line in lines if line.startswith("| ") and _name(line) != _HEADS[0]}
        rows = list({**known, **{_name(row): row for row in rows}}.values())
        facts = [line.removeprefix("- ") for line in lines if line.startswith("- ")] or facts
    lines = [
        "| " + " | ".join(_HEADS) + " |",
        "|" + "---|" * len(_HEADS),
        *rows,
        "",
        *(f"- {fact}" for fact in facts),
    ]
    path.write_text(before + begin + "\n" + "\n".join(lines) + "\n" + end + after)


def _name(row: str) -> str:
    return row.split(" | ")[0].removeprefix("| ")


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
        str(m.facts.get("date", "")),
    ]
