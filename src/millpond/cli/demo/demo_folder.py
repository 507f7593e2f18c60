"""The demo's folder, the shop in it, and its orders."""

from __future__ import annotations

import errno
import os
import random
import shutil
from collections.abc import Iterator
from pathlib import Path

MARK = ".millpond-demo"
"""Only a folder with this file in it is cleared."""
QUEUE = "orders"
SHOP = "demo_shop.py"
"""Not `shop.py`: the user may have one in the current folder."""
_BUG = '"PL": 5.50}'
_FIX = '"PL": 5.50, "NO": 14.00}'
_SKUS = ("lamp", "chair", "kettle", "bicycle", "blanket", "umbrella", "clock", "basket", "teapot", "mirror")


class DemoFolder:
    """The folder with all files of a demo."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.shop = folder / SHOP
        self.log = folder / "workers.log"
        self.spark_log = folder / "spark.log"
        self.lake = folder / "lake"
        self.report = folder / "report"
        self.url = f"sqlite:///{folder.resolve() / 'orders.db'}"

    @property
    def environment(self) -> dict[str, str]:
        """Environment of processes that import the shop."""
        path = [str(self.folder.resolve()), *filter(None, [os.environ.get("PYTHONPATH")])]
        return {**os.environ, "PYTHONPATH": os.pathsep.join(path)}

    def prepare(self) -> None:
        """Create the folder, or replace it if an earlier demo made it."""
        if self.folder.exists() and any(self.folder.iterdir()) and not (self.folder / MARK).exists():
            problem = "contains files of other programs; move it away, or choose another folder"
            raise FileExistsError(errno.EEXIST, problem, str(self.folder))
        shutil.rmtree(self.folder, ignore_errors=True)
        self.folder.mkdir(parents=True)
        (self.folder / MARK).touch()
        shutil.copyfile(Path(__file__).with_name(SHOP), self.shop)

    def fix(self) -> str:
        """Fix the bug in the shop and return the changed line."""
        before = self.shop.read_text()
        self.shop.write_text(before.replace(_BUG, _FIX))
        (line,) = [line for line in self.shop.read_text().splitlines() if _FIX in line]
        return line


def orders(count: int) -> Iterator[dict[str, object]]:
    """The same orders in every demo. Two in a hundred go to Norway, which the shop forgot."""
    chance = random.Random(7)
    for number in range(1, count + 1):
        country = "NO" if number % 50 == 0 else chance.choice(("AT", "CH", "DE", "DE", "DE", "FR", "IT", "PL"))
        sku = "fax-machine" if number % 400 == 13 else chance.choice(_SKUS)
        yield {
            "number": number,
            "customer": f"customer-{chance.randrange(count // 5 + 1)}",
            "country": country,
            "sku": sku,
            "total": round(chance.uniform(5, 300), 2),
        }
