"""`python -m bench`: measure and print. The exit code is 1 if a bar was missed."""

import argparse
import asyncio
import os
import platform
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from datetime import date
from pathlib import Path

from rich.console import Console

from bench.databases import Database, MariadbDatabase, PostgresDatabase, SqliteDatabase
from bench.measure import Measurement
from bench.report import print_table, write_json, write_markdown
from bench.scenarios import SCENARIOS, Scenario
from bench.sizes import FULL, QUICK, Sizes

DATABASES: Mapping[str, Callable[[], Database]] = {
    "postgres": PostgresDatabase,
    "mariadb": MariadbDatabase,
    "sqlite": SqliteDatabase,
}


async def measure(
    scenarios: Sequence[Scenario],
    sizes: Sizes,
    databases: Mapping[str, Callable[[], Database]] = DATABASES,
    done: Callable[[Measurement], None] = lambda _: None,
) -> list[Measurement]:
    """Run scenarios. Each database is started when the first scenario needs it."""
    started: dict[str, Database] = {}
    found = []
    try:
        for scenario in scenarios:
            if scenario.database not in started:
                started[scenario.database] = databases[scenario.database]()
            database = started[scenario.database]
            began = time.monotonic()
            for measurement in await scenario.run(scenario, database, sizes):
                facts = {**machine(), **database.facts(), "seconds": round(time.monotonic() - began, 1)}
                found.append(measurement.with_facts(facts))
                done(found[-1])
    finally:
        for database in started.values():
            database.close()
    return found


def machine() -> dict[str, object]:
    return {
        "python": platform.python_version(),
        "system": platform.system(),
        "cpus": os.cpu_count(),
        "date": date.today().isoformat(),
    }


def main() -> int:
    names = [scenario.name for scenario in SCENARIOS]
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__, epilog=f"NAMES: {', '.join(names)}")
    parser.add_argument(
        "--only", metavar="NAME", action="append", help="measurements whose name begins with this; may be repeated"
    )
    parser.add_argument("--quick", action="store_true", help="small sizes: minutes instead of half an hour")
    parser.add_argument("--held-minutes", type=float, metavar="N", help="length of held-latency; default: 5")
    parser.add_argument("--no-bars", action="store_true", help="exit with 0 even if a bar is missed")
    parser.add_argument("--json", type=Path, default=Path("build/bench.jsonl"), help="default: %(default)s")
    parser.add_argument(
        "--markdown",
        type=Path,
        metavar="FILE",
        help="replace the table in this document too, or only the rows of --only",
    )
    options = parser.parse_args()
    wanted = [s for s in SCENARIOS if not options.only or any(s.name.startswith(name) for name in options.only)]
    if not wanted:
        parser.error(f"no measurement is named {', '.join(options.only)}; there are {', '.join(names)}")
    console = Console()

    def done(m: Measurement) -> None:
        mark = {True: "✓", False: "✗", None: " "}[m.met]
        console.print(f"{mark} {m.name}: {m.value:.2f} {m.unit} ({m.low:.2f}-{m.high:.2f}), {m.facts['seconds']} s")

    sizes = QUICK if options.quick else FULL
    if options.held_minutes:
        sizes = replace(sizes, steady_seconds=60 * options.held_minutes)
    found = asyncio.run(measure(wanted, sizes, done=done))
    print_table(console, found)
    write_json(options.json, found)
    if options.markdown:
        write_markdown(options.markdown, found, _facts(found), others=bool(options.only))
    missed = [m.name for m in found if m.met is False]
    if missed:
        console.print(f"below the bar: {', '.join(missed)}")
    return 1 if missed and not options.no_bars else 0


def _facts(found: Sequence[Measurement]) -> list[str]:
    """Versions and settings, a line for each database."""
    lines = [", ".join(f"{name} {value}" for name, value in machine().items() if name != "date")]
    hidden = {*machine(), "messages", "rounds", "ratios", "seconds"}
    for database in DATABASES:
        for m in found:
            if m.name.startswith(database):
                shown = {k: v for k, v in m.facts.items() if k not in hidden and " " not in k}
                lines.append(f"{database}: " + ", ".join(f"{name} {value}" for name, value in shown.items()))
                break
    return lines


if __name__ == "__main__":
    sys.exit(main())
