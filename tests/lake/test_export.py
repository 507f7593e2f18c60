"""What an export brings to a lake: every archived message once, with every column, whatever its queue is called."""

from __future__ import annotations

import asyncio
import os
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec
import pytest

import millpond
from millpond import Ack, Message
from millpond.errors import InvalidOption, LakeDamaged, LakeFenced, WrongLake
from millpond.message import NAME_LIMIT
from millpond.spark.lake.compact import compact_opened
from millpond.spark.lake.manifest import Lake
from millpond.spark.lake.parquet import folder_of
from millpond.spark.lake.read import files
from tests.lake.here import Here, export, exporter, lake_rows
from tests.spark.ponds import HOSTILE, fill, rows

pytestmark = pytest.mark.usefixtures("soon")

WORSE = (
    *("../../up", "/etc/passwd", ".", "..", "_millpond", "CON", "Orders", "orders ~", "a%2Fb", "a=b"),
    *("\U0001f980" * NAME_LIMIT, "x" * NAME_LIMIT),
)


def ids(found: list[dict[str, Any]]) -> list[str]:
    return sorted(row["id"] for row in found)


def archived(url: str) -> list[str]:
    return sorted(str(id_) for id_ in rows(url, "archive"))


async def settle(url: str, queue: str, bodies: list[Any]) -> None:
    pond = millpond.Millpond(url)
    await pond.publish_many(queue, bodies)
    store: Any = await pond.transport
    assert not await store.settle([Ack(claim.receipt) for claim in await store.claim([queue], limit=len(bodies))])
    await pond.close()


def test_every_column_of_every_message(url: str, tmp_path: Path) -> None:
    fill(url, [*HOSTILE, *WORSE], each=6)
    done = export(tmp_path / "lake", url)
    found = {row["id"]: row for row in lake_rows(tmp_path / "lake")}
    wanted = rows(url, "archive")
    assert done.rows == len(found) == len(wanted) > 0
    for id_, row in wanted.items():
        got = found[str(id_)]
        assert got["queue"] == row.queue and got["key"] == row.key and got["payload"] == row.payload
        assert (got["state"], got["reason"], got["error"]) == (row.state.value, row.reason, row.error)
        assert msgspec.json.decode(got["headers"] or "{}") == dict(row.headers)
        for moment in ("created_at", "due_at", "archived_at", "first_attempt_at", "last_attempt_at", "expires_at"):
            assert got[moment] == getattr(row, moment), moment
        for number in ("priority", "deliveries", "attempts"):
            assert got[number] == getattr(row, number)
        assert got["day"] == row.archived_at.date() and got["shard"] == 0


def test_files_stay_within_the_lake_by_queue_and_day(sqlite_url: str, tmp_path: Path) -> None:
    fill(sqlite_url, [*HOSTILE, *WORSE], each=6)
    export(tmp_path / "lake", sqlite_url)
    days = {
        datetime.now(UTC).date().isoformat(),
        *(os.path.basename(os.path.dirname(f)) for f in files(tmp_path / "lake")),
    }
    for queue in (*HOSTILE, *WORSE):
        (found,) = {os.path.dirname(os.path.dirname(file)) for file in files(tmp_path / "lake", queue=queue)}
        assert os.path.dirname(found) == str(tmp_path / "lake")
        assert found == str(tmp_path / "lake" / folder_of(queue)) and len(os.path.basename(found)) < 101
    assert all(len(day) == 10 for day in days)
    assert len({folder_of(queue).lower() for queue in (*HOSTILE, *WORSE)}) == len(HOSTILE) + len(WORSE)


def test_each_export_takes_what_is_new(url: str, tmp_path: Path) -> None:
    for n in range(4):
        if n != 2:
            fill(url, ["orders", "other"])
        done = export(tmp_path / "lake", url)
        assert done.files == (0 if n == 2 else 2)
        assert ids(lake_rows(tmp_path / "lake")) == archived(url)
    # Nothing new, no entry: an idle lake does not grow.
    before = Lake(tmp_path / "lake").state.number
    one = exporter(tmp_path / "lake", url)
    for _ in range(3):
        one.export()
    one.close()
    assert Lake(tmp_path / "lake").state.number == before + 1


def test_a_long_time_between_two(url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By pages, not by the index; or too many queues for it"""
    monkeypatch.setattr("millpond.transports.database.fetch.closed.SHORT", 0)
    monkeypatch.setattr("millpond.transports.database.fetch.closed._MOST_QUEUES", 3)
    for _ in range(2):
        fill(url, HOSTILE)
        export(tmp_path / "lake", url)
        assert ids(lake_rows(tmp_path / "lake")) == archived(url)


def test_several_databases(tmp_path: Path) -> None:
    urls = [f"sqlite:///{tmp_path / name}.db" for name in ("a", "b", "c")]
    for n, url in enumerate(urls):
        fill(url, ["orders"], each=12 + n)
    export(tmp_path / "lake", " ".join(urls))
    fill(urls[1], ["more"])
    export(tmp_path / "lake", " ".join(urls))
    found = lake_rows(tmp_path / "lake")
    assert ids(found) == sorted(id_ for url in urls for id_ in archived(url))
    assert {row["shard"] for row in found} == {0, 1, 2}
    with pytest.raises(WrongLake, match="order"):
        export(tmp_path / "lake", " ".join(reversed(urls)))


def test_a_lake_knows_its_database(url: str, tmp_path: Path) -> None:
    fill(url, ["orders"])
    export(tmp_path / "lake", url)
    other = f"sqlite:///{tmp_path / 'other.db'}"
    fill(other, ["orders"])
    with pytest.raises(WrongLake, match="another database"):
        export(tmp_path / "lake", other)
    assert ids(lake_rows(tmp_path / "lake")) == archived(url)


def test_an_older_copy_of_a_lake_is_refused(tmp_path: Path, sqlite_url: str) -> None:
    fill(sqlite_url, ["orders"])
    export(tmp_path / "lake", sqlite_url)
    entries = sorted((tmp_path / "lake" / "_millpond" / "log").iterdir())
    entries[-1].unlink()
    with pytest.raises(LakeDamaged, match="older copy"):
        export(tmp_path / "lake", sqlite_url)


def test_two_at_once(sqlite_url: str, tmp_path: Path) -> None:
    """The second fences the first, which commits nothing"""
    fill(sqlite_url, ["orders"])
    first, second = exporter(tmp_path / "lake", sqlite_url), exporter(tmp_path / "lake", sqlite_url)
    first.opened()
    second.export()
    with pytest.raises(LakeFenced):
        fill(sqlite_url, ["more"])
        first.export()
    second.export()
    first.close()
    second.close()
    assert ids(lake_rows(tmp_path / "lake")) == archived(sqlite_url)


def test_bodies_as_columns(sqlite_url: str, tmp_path: Path) -> None:
    path = tmp_path / "lake"
    asyncio.run(
        settle(sqlite_url, "orders", [{"sku": 7, "note": "x", "tags": [1]}, {"sku": 2.5}, {"sku": True}, "text", [1]])
    )
    export(path, sqlite_url, decode="sku bigint, note string")
    by_payload = {row["payload"]: row["body"] for row in lake_rows(path)}
    assert by_payload[b'{"sku":7,"note":"x","tags":[1]}'] == {"sku": 7, "note": "x"}
    assert by_payload[b'{"sku":2.5}'] == {"sku": None, "note": None} == by_payload[b'{"sku":true}']
    assert by_payload[b"[1]"] is None
    # What a lake has decoded once it goes on decoding; a field may be added, and keeps its type.
    asyncio.run(settle(sqlite_url, "orders", [{"sku": 8, "price": 1, "tags": [1, "a"]}, {"price": 2.5, "gone": None}]))
    export(path, sqlite_url, decode="infer")
    assert Lake(path).state.body == {"sku": "bigint", "note": "string", "price": "double", "tags": "string"}
    asyncio.run(settle(sqlite_url, "orders", [{"sku": 9, "price": 3}]))
    export(path, sqlite_url)
    bodies = {row["payload"]: row["body"] for row in lake_rows(path)}
    assert bodies[b'{"sku":8,"price":1,"tags":[1,"a"]}'] == {"sku": 8, "note": None, "price": 1.0, "tags": '[1,"a"]'}
    assert bodies[b'{"sku":9,"price":3}'] == {"sku": 9, "note": None, "price": 3.0, "tags": None}
    for wrong in ("sku string", "sku", "sku decimal(3)"):
        with pytest.raises(InvalidOption):
            export(path, sqlite_url, decode=wrong)
    # Files of before and after become one.
    one = exporter(path, sqlite_url)
    assert compact_opened(Here(), one.opened()).by == 1  # type: ignore[arg-type]
    one.close()
    assert ids(lake_rows(path)) == archived(sqlite_url)
    merged = {row["payload"]: row["body"] for row in lake_rows(path)}
    assert merged[b'{"sku":7,"note":"x","tags":[1]}'] == {"sku": 7, "note": "x", "price": None, "tags": None}
    assert merged[b"[1]"] is None and merged[b'{"sku":9,"price":3}'] == bodies[b'{"sku":9,"price":3}']


def test_small_files_become_large_ones(sqlite_url: str, tmp_path: Path) -> None:
    path = tmp_path / "lake"
    for _ in range(3):
        fill(sqlite_url, ["orders", "other"])
        export(path, sqlite_url)
    old = files(path)
    orphan = Path(old[0]).with_name("00000001-0-orphan.parquet")
    orphan.write_bytes(b"of a task that nobody waited for")
    one = exporter(path, sqlite_url)
    done = compact_opened(Here(), one.opened())  # type: ignore[arg-type]
    assert (done.replaced, done.by, done.deleted) == (6, 2, 1)
    assert len(files(path)) == 2 and not orphan.exists()
    assert ids(lake_rows(path)) == archived(sqlite_url)
    assert all(os.path.exists(file) for file in old), "a reader may have begun with them"
    done = compact_opened(Here(), one.opened(), keep=0)  # type: ignore[arg-type]
    assert (done.replaced, done.by, done.deleted) == (0, 0, 6)
    assert not any(os.path.exists(file) for file in old)
    fill(sqlite_url, ["orders"])
    one.export()
    one.close()
    assert ids(lake_rows(path)) == archived(sqlite_url)


def test_no_json_at_all(sqlite_url: str, tmp_path: Path) -> None:
    async def binary() -> None:
        store: Any = await millpond.connect(sqlite_url)
        await store.publish([Message(queue="q", payload=bytes([n, 255])) for n in range(5)])
        await store.settle([Ack(claim.receipt) for claim in await store.claim(["q"], limit=5)])
        await store.close()

    asyncio.run(binary())
    export(tmp_path / "lake", sqlite_url, decode="infer")
    assert ids(lake_rows(tmp_path / "lake")) == archived(sqlite_url)
    assert Lake(tmp_path / "lake").state.body == {}
