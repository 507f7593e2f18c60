"""Writes lakes in the format of earlier versions: our own log, and files by queue and day."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from uuid import uuid4

import pyarrow as pa
import pyarrow.parquet as pq

from millpond.clock import as_datetime
from millpond.seam.arrow import arrow_schema
from millpond.spark.columns import batch_columns

CHECKPOINT_EVERY = 32


class OldLakeWriter:
    def __init__(self, root: Path) -> None:
        self.root, self.id = root, str(uuid4())
        self.log = root / "_millpond" / "log"
        self.log.mkdir(parents=True)
        (root / "_millpond" / "lake.json").write_text(json.dumps({"format": 1, "id": self.id}))
        self.state: dict[str, Any] = {"number": 0, "epoch": 1, "files": {}, "until": {}, "body": {}, "removed": {}}
        self.append("open")

    def append(self, what: str, **facts: Any) -> None:
        state = self.state
        state["number"] += 1
        entry = {"number": state["number"], "epoch": state["epoch"], "at_us": 0, "what": what, **facts}
        with (self.log / f"{state['number']:012}.json").open("x") as file:  # as an export does: fails if it is there
            json.dump(entry, file)
        for path in facts.get("removed", ()):
            state["files"].pop(path, None)
            state["removed"][path] = 0
        state["files"] |= {file["path"]: file for file in facts.get("added", ())}
        state["until"] |= facts.get("until", {})
        state["body"] |= facts.get("body", {})
        if state["number"] % CHECKPOINT_EVERY == 0:
            (self.log / f"{state['number']:012}.checkpoint").write_text(json.dumps(state))

    def write(self, rows: Sequence[Mapping[str, Any]], body: Mapping[str, str] | None = None) -> list[dict[str, Any]]:
        """One file for each queue and day; returns the entries of the log."""
        schema = arrow_schema(batch_columns("archive")).append(pa.field("day", pa.date32()))
        if body:
            types = {"bigint": pa.int64(), "string": pa.string(), "double": pa.float64()}
            schema = schema.append(pa.field("body", pa.struct([(n, types[type_]) for n, type_ in body.items()])))
        places: dict[tuple[str, str, int], list[dict[str, Any]]] = {}
        for row in rows:
            day = as_datetime(row["archived_at"]).date()
            places.setdefault((row["queue"], str(day), row["shard"]), []).append({**row, "day": day})
        added = []
        for (queue, day, shard), found in places.items():
            folder = self.root / "".join(c if c.isalnum() else "_" for c in queue) / day
            folder.mkdir(parents=True, exist_ok=True)
            path = folder / f"00000001-{shard}-{uuid4().hex}.parquet"
            full = [{name: row.get(name) for name in schema.names} for row in found]
            pq.write_table(pa.Table.from_pylist(full, schema), path)
            times = [row["archived_at"] for row in found]
            relative = str(path.relative_to(self.root))
            size, bounds = path.stat().st_size, {"first_us": min(times), "last_us": max(times)}
            facts = {"path": relative, "rows": len(found), "size": size, "queue": queue, "day": day, "shard": shard}
            added.append({**facts, **bounds})
        return added
