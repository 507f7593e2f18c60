"""CPU time to import Millpond, against the modules that it needs. Its files are compiled, as after an installation.

Against another version: `git worktree add ../before COMMIT && python -m bench.imports ../before`.
"""

import argparse
import asyncio
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median

from bench.databases import Database
from bench.measure import Measurement, ratio
from bench.scenario import Scenario
from bench.sizes import Sizes

OURS = "import millpond"
NEEDED = "import asyncio, inspect, logging, msgspec, secrets, socket, uuid, uuid_utils"
ROOT = Path(__file__).parents[1]


def take_turns(turns: int, before: Path | None = None) -> tuple[list[float], list[float]]:
    """Seconds of each import, ours and theirs, in new processes that alternate: a load affects both.

    Theirs is the Millpond of the checkout `before`, or the modules that ours needs.
    """
    theirs = (NEEDED, ROOT) if before is None else (OURS, before)
    with tempfile.TemporaryDirectory() as cache:
        for code, checkout in ((OURS, ROOT), theirs):
            _seconds(code, checkout, cache)
        took = [(_seconds(OURS, ROOT, cache), _seconds(*theirs, cache)) for _ in range(turns)]
    return [one for one, _ in took], [other for _, other in took]


def _seconds(code: str, checkout: Path, cache: str) -> float:
    measured = f"import time; began = time.process_time(); {code}; print(time.process_time() - began)"
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    done = subprocess.run(
        [sys.executable, "-c", measured],
        env={**environment, "PYTHONPYCACHEPREFIX": cache, "PYTHONPATH": str(checkout.resolve() / "src")},
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    return float(done.stdout)


async def importing(scenario: Scenario, database: Database, sizes: Sizes) -> list[Measurement]:
    ours, theirs = await asyncio.to_thread(take_turns, 3 * sizes.rounds)
    return [ratio(scenario.name, "import", "its dependencies", ours, theirs, 1, at_least=scenario.bar)]


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.imports", description=__doc__)
    parser.add_argument("checkout", type=Path, help="of the version to compare with")
    parser.add_argument("--turns", type=int, default=15, help="default: %(default)s")
    asked = parser.parse_args()
    if not (asked.checkout / "src" / "millpond").is_dir():
        parser.error(f"{asked.checkout} is no checkout of Millpond")
    now, before = take_turns(asked.turns, asked.checkout)
    print(f"import millpond: {median(now) / median(before):.2f} times the CPU time of {asked.checkout}")


if __name__ == "__main__":
    main()
