"""A file that processes append lines of JSON to: it works while a database is away, and outlives a kill."""

from __future__ import annotations

import json
import os
from functools import cached_property
from pathlib import Path
from typing import Any


class History:
    def __init__(self, path: Path) -> None:
        self._path = path

    @cached_property
    def _file(self) -> int:
        # Opened by writers only: readers make a new history for each read.
        return os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)

    def write(self, **facts: Any) -> None:
        os.write(self._file, json.dumps({"pid": os.getpid(), **facts}).encode() + b"\n")

    def read(self) -> list[dict[str, Any]]:
        """All complete lines so far."""
        if not self._path.exists():
            return []
        lines = self._path.read_bytes().split(b"\n")[:-1]
        return [json.loads(line) for line in lines]
