"""`python -m bench.demo CHECKOUT`: time of the demo, against that of another checkout such as an earlier version.

Both run with this interpreter and its packages, alternating. The exit code is 1 if the median ratio is below the bar.
"""

import argparse
import asyncio
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from rich.console import Console

from bench.measure import Measurement, Work, ratio, take_turns
from bench.report import print_table

BAR = 0.95
"""Noise included: the demo has not become slower."""
HERE = Path(__file__).parents[1]


def work(checkout: Path, orders: int) -> Work:
    environment = os.environ | {"PYTHONPATH": str(checkout / "src")}

    def run() -> float:
        with tempfile.TemporaryDirectory(prefix="millpond-bench-") as folder:
            command = [sys.executable, "-m", "millpond", "demo", "--folder", f"{folder}/demo", "--orders", str(orders)]
            began = time.monotonic()
            subprocess.run(command, check=True, env=environment, stdout=subprocess.DEVNULL, stdin=subprocess.DEVNULL)
            return time.monotonic() - began

    return lambda: asyncio.to_thread(run)


async def measure(other: Path, orders: int, rounds: int) -> Measurement:
    took = await take_turns({"ours": work(HERE, orders), "theirs": work(other, orders)}, rounds)
    against = f"the demo of {other}"
    return ratio("demo", f"demo with {orders:,} orders", against, took["ours"], took["theirs"], orders, at_least=BAR)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.demo", description=__doc__)
    parser.add_argument("checkout", type=Path)
    parser.add_argument("--orders", type=int, default=30_000, help="default: %(default)s")
    parser.add_argument("--rounds", type=int, default=3, help="default: %(default)s")
    options = parser.parse_args()
    found = asyncio.run(measure(options.checkout.resolve(), options.orders, options.rounds))
    print_table(Console(), [found])
    return 0 if found.met else 1


if __name__ == "__main__":
    sys.exit(main())
