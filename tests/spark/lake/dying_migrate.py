"""A migration that is killed at one point: `python -m tests.spark.lake.dying_migrate LAKE POINT`."""

from __future__ import annotations

import sys
from typing import Any

from millpond.spark.lake import migrate
from millpond.spark.lake.storage import Folder
from millpond.spark.lake.table import Lake
from tests.spark.lake.dying import die_after

MIGRATE = sys.modules["millpond.spark.lake.migrate"]  # the function of the same name hides the module
POINTS: dict[str, tuple[Any, str, int]] = {
    "fenced": (MIGRATE, "fence", 1),
    "table made": (Lake, "create", 1),
    "fields added": (Lake, "add_fields", 1),
    "a file linked": (Folder, "link", 2),
    "files listed": (MIGRATE, "_progress", 1),
    "committed, not synced": (Lake, "_commit", 1),
    "committed": (Lake, "export", 1),
}

if __name__ == "__main__":
    die_after(*POINTS[sys.argv[2]])
    migrate(sys.argv[1])
