"""`python -m bench.spark`: measure and print; the exit code is 0 if every bar was reached."""

import argparse
import asyncio
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

from rich.console import Console

from bench.measure import Measurement
from bench.report import print_table, write_json, write_markdown
from bench.spark.batch import batch
from bench.spark.export import export
from bench.spark.handlers import handlers
from bench.spark.report import ROWS as REPORT_ROWS
from bench.spark.report import measure_report
from bench.spark.setup import Setup, set_up
from bench.spark.sink import sink
from bench.spark.stream import stream

Measure = Callable[[Setup, int, int], Awaitable[list[Measurement]]]
"""A measurement over a number of rows, in a number of rounds."""

MEASURES: dict[str, Measure] = {
    "batch": batch,
    "export": export,
    "sink": sink,
    "stream": stream,
    "report": measure_report,
    "handlers": handlers,
}


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.spark", description=__doc__)
    parser.add_argument("--only", metavar="NAME", action="append", choices=MEASURES, help="may be repeated")
    parser.add_argument("--rows", type=int, default=1_000_000, help="default: %(default)s")
    parser.add_argument("--report-rows", type=int, default=REPORT_ROWS, help="rows of the report; default: %(default)s")
    parser.add_argument("--rounds", type=int, default=5, help="default: %(default)s")
    parser.add_argument("--no-bars", action="store_true", help="succeed also if a bar is missed")
    parser.add_argument("--json", type=Path, default=Path("build/bench-spark.jsonl"), help="default: %(default)s")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="replace the table in this document too")
    options = parser.parse_args()
    found: list[Measurement] = []
    with set_up() as setup:
        for name in options.only or MEASURES:
            began = time.monotonic()
            rows = options.report_rows if name == "report" else options.rows
            measured = asyncio.run(MEASURES[name](setup, rows, options.rounds))
            seconds = {"seconds": round(time.monotonic() - began, 1)}
            found += [measurement.with_facts({**setup.facts, **seconds}) for measurement in measured]
    console = Console()
    print_table(console, found)
    write_json(options.json, found)
    if options.markdown:
        write_markdown(options.markdown, found, [], table="bench-spark")
    missed = [m.name for m in found if m.met is False]
    if missed:
        console.print(f"below the bar: {', '.join(missed)}")
    return 1 if missed and not options.no_bars else 0


if __name__ == "__main__":
    sys.exit(main())
