"""The page of a pond with thousands of queues stays small, and shows the busiest and slowest. No Spark is needed."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import msgspec
import pyarrow as pa

from millpond.spark.report import Report
from millpond.spark.report.figures import TABLES

NOW = datetime(2026, 11, 19, tzinfo=UTC)
QUEUES = 3000


def test_the_page_does_not_grow_with_the_number_of_queues() -> None:
    columns = {column for name in ("by_queue", "slowest") for column in TABLES[name]}
    # The last queues are the busiest, and those in the middle have the slowest messages.
    rows = [
        dict.fromkeys(columns, 1) | {"queue": f"q{n}", "settled": n, "id": f"{n}-{place}", "at": NOW}
        for n in [*range(QUEUES // 2, QUEUES), *range(QUEUES // 2)]
        for place in range(10)
    ]
    tables = {name: pa.table({column: [] for column in columns}) for name, columns in TABLES.items()}
    tables["by_queue"] = pa.Table.from_pylist([{c: row[c] for c in TABLES["by_queue"]} for row in rows[::10]])
    tables["slowest"] = pa.Table.from_pylist([{c: row[c] for c in TABLES["slowest"]} for row in rows])
    page = Report(tables, NOW, timedelta(hours=1)).page()
    data = msgspec.json.decode(page.partition('id="data">')[2].partition("</script>")[0])
    assert len(data["by_queue"]) == 500 and data["by_queue"][0]["queue"] == data["names"][0] == "q2999"
    assert [row["queue"] for row in data["slowest"][:10]] == ["q1500"] * 10
    assert {row["queue"] for row in data["slowest"][10:]} == set(data["names"])
    assert "of 3,000 queues the 20 busiest can be chosen, and the 500 busiest are in the table" in data["left_out"]
    assert len(page) < 1 << 20
