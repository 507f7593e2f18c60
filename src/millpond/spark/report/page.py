"""A report as one self-contained HTML page, with styles, script and data.

Queue names, reasons and errors are untrusted. They are embedded as JSON without markup characters, the script turns
them into text nodes, and the page's content security policy allows only our script.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Collection, Sequence
from html import escape
from importlib import resources
from typing import TYPE_CHECKING, Any

import msgspec

from millpond.spark.report.figures import LISTED
from millpond.style import base

if TYPE_CHECKING:
    from millpond.spark.report.report import Report

MOST_PERIODS = 1500
MOST_QUEUES = 20
"""Queues with charts over time: with more, the page would be too large for a browser."""
MOST_LISTED = 500
"""Queues in the page's table of queues."""
_SCRIPTS = ("charts.js", "page.js")
_NOT_IN_JSON = {ord(c): f"\\u{ord(c):04x}" for c in "<>&\u2028\u2029"}


def page(report: Report) -> str:
    style, body = base() + _asset("page.css"), _asset("body.html")
    script = "\n".join(map(_asset, _SCRIPTS))
    data = msgspec.json.encode(_data(report)).decode().translate(_NOT_IN_JSON)
    policy = f"default-src 'none'; img-src data:; style-src '{_hash(style)}'; script-src '{_hash(script)}'"
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<link rel="icon" href="data:,">
<title>{escape(f"{report.source} · " if report.source else "")}Millpond report</title>
<style>{style}</style>
</head>
<body>
{body}<script type="application/json" id="data">{data}</script>
<script>{script}</script>
</body>
</html>
"""


def _data(report: Report) -> dict[str, Any]:
    """The data for the script: the tables, long ones cut."""
    busiest = sorted(report.rows("by_queue"), key=lambda row: (-row["settled"], row["queue"]))
    live = report.rows("backlog") if "backlog" in report.tables else None
    periods = report.rows("by_time")[-MOST_PERIODS:]
    drawn = {row["queue"] for row in busiest[:MOST_QUEUES]}
    earliest = periods[0]["at"] if periods else None
    return {
        "source": report.source,
        "scope": _scope(report),
        "every_s": report.every.total_seconds(),
        "names": [row["queue"] for row in busiest[:MOST_QUEUES]],
        "summary": next(iter(report.rows("summary")), None),
        "by_queue": busiest[:MOST_LISTED],
        "by_time": periods,
        "by_queue_and_time": [
            row for row in report.rows("by_queue_and_time") if row["queue"] in drawn and row["at"] >= earliest
        ],
        "failures": report.rows("failures"),
        "slowest": _shown(report.rows("slowest"), drawn),
        "poisonous": _shown(report.rows("poisonous"), drawn),
        "backlog": live,
        "left_out": _left_out(report),
    }


def _shown(rows: Sequence[dict[str, Any]], drawn: Collection[str]) -> list[dict[str, Any]]:
    """The first rows, and those of queues that can be chosen. Each queue has some rows, so all are too many."""
    return [row for n, row in enumerate(rows) if n < LISTED or row["queue"] in drawn]


def _scope(report: Report) -> str:
    summary = report.rows("summary")
    first, last = (summary[0]["first_at"], summary[0]["last_at"]) if summary else (None, None)
    parts = []
    if (since := report.since or first) is not None:
        parts.append(f"from {since:%Y-%m-%d %H:%M:%S}")
    if (until := report.until or last) is not None:
        parts.append(f"to {until:%Y-%m-%d %H:%M:%S}")
    return f"{' '.join(parts)}; made at {report.made_at:%Y-%m-%d %H:%M:%S} (UTC)".lstrip("; ")


def _left_out(report: Report) -> str | None:
    limits = []
    if (queues := report.tables["by_queue"].num_rows) > MOST_QUEUES:
        limits.append(f"of {queues:,} queues the {MOST_QUEUES} busiest can be chosen")
    if queues > MOST_LISTED:
        limits.append(f"the {MOST_LISTED} busiest are in the table")
    if (periods := report.tables["by_time"].num_rows) > MOST_PERIODS:
        limits.append(f"of {periods:,} periods the last {MOST_PERIODS:,} are drawn")
    return f"The tables have everything; here, {', and '.join(limits)}." if limits else None


def _asset(name: str) -> str:
    return (resources.files(__package__) / "assets" / name).read_text(encoding="utf-8")


def _hash(text: str) -> str:
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"
