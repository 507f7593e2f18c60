"""A report as one HTML page that needs nothing else: styles, script and data are in it.

Queue names, reasons and errors are others' texts. They travel as JSON in which no markup can stand, the script
makes text nodes of them, and the page's policy lets no script run but ours.
"""

from __future__ import annotations

import base64
import hashlib
from importlib import resources
from typing import TYPE_CHECKING, Any

import msgspec

if TYPE_CHECKING:
    from millpond.spark.report.report import Report

MOST_PERIODS = 1500
MOST_QUEUES = 20
"""Of which the page has charts over time: with more it would be too large for a browser."""
_SCRIPTS = ("charts.js", "page.js")
_NOT_IN_JSON = {ord(c): f"\\u{ord(c):04x}" for c in "<>&\u2028\u2029"}


def page(report: Report) -> str:
    style, body = _asset("page.css"), _asset("body.html")
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
<title>Millpond report</title>
<style>{style}</style>
</head>
<body>
{body}<script type="application/json" id="data">{data}</script>
<script>{script}</script>
</body>
</html>
"""


def _data(report: Report) -> dict[str, Any]:
    """What the script reads: the tables, of which the long ones are cut."""
    busiest = sorted(report.rows("by_queue"), key=lambda row: (-row["settled"], row["queue"]))
    live = report.rows("backlog") if "backlog" in report.tables else None
    periods = report.rows("by_time")[-MOST_PERIODS:]
    drawn = {row["queue"] for row in busiest[:MOST_QUEUES]}
    earliest = periods[0]["at"] if periods else None
    return {
        "scope": _scope(report),
        "every_s": report.every.total_seconds(),
        "names": [row["queue"] for row in busiest[:MOST_QUEUES]],
        "summary": next(iter(report.rows("summary")), None),
        "by_queue": busiest,
        "by_time": periods,
        "by_queue_and_time": [
            row for row in report.rows("by_queue_and_time") if row["queue"] in drawn and row["at"] >= earliest
        ],
        "failures": report.rows("failures"),
        "slowest": report.rows("slowest"),
        "poisonous": report.rows("poisonous"),
        "backlog": live,
        "left_out": _left_out(report),
    }


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
    said = []
    if (queues := report.tables["by_queue"].num_rows) > MOST_QUEUES:
        said.append(f"of {queues:,} queues the {MOST_QUEUES} busiest can be chosen")
    if (periods := report.tables["by_time"].num_rows) > MOST_PERIODS:
        said.append(f"of {periods:,} periods the last {MOST_PERIODS:,} are drawn")
    return f"The tables have everything; here, {' and '.join(said)}." if said else None


def _asset(name: str) -> str:
    return (resources.files(__package__) / "assets" / name).read_text(encoding="utf-8")


def _hash(text: str) -> str:
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"
