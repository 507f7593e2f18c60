"""An export adds every archived message once, with every column, for every name of a queue."""

from __future__ import annotations

import asyncio
import os
import re
import sys
import tracemalloc
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import millpond
from millpond import Ack, Message
from millpond.clock import SECOND
from millpond.errors import InvalidOption, LakeDamaged, LakeFenced, StoreError, StoreUnavailable, Unreachable, WrongLake
from millpond.message import NAME_LIMIT
from millpond.spark.lake import table
from millpond.spark.lake.body import NO_OBJECT, Decoder, infer_fields
from millpond.spark.lake.compact import compact
from millpond.spark.lake.export import Exporter
from millpond.spark.lake.read import files
from millpond.spark.lake.schedule import summary
from millpond.spark.lake.storage import storage_of
from millpond.spark.lake.table import Lake, LakeChanged
from millpond.spark.options import SparkShard
from millpond.transports.database.exports.exports import DatabaseExports
from millpond.transports.url import Url
from tests.shared import empty_database
from tests.spark.lake.here import Here, export, exporter, lake_rows
from tests.spark.lake.readers import by_duckdb
from tests.spark.ponds import HOSTILE, fill, rows
from tests.triggers import execute

pytestmark = [pytest.mark.usefixtures("soon"), pytest.mark.slow_on_servers]

WORSE = (
    *("../../up", "/etc/passwd", ".", "..", "_millpond", "CON", "Orders", "orders ~", "a%2Fb", "a=b"),
    *("\U0001f980" * NAME_LIMIT, "x" * NAME_LIMIT),
)


def ids(found: list[dict[str, Any]]) -> list[str]:
    return sorted(row["id"] for row in found)


def in_lake(path: Path) -> list[str]:
    """The ids of a lake's messages, which DuckDB sees as our reader does."""
    found = by_duckdb(path)
    assert found == ids(lake_rows(path))
    return found


def archived(url: str) -> list[str]:
    return sorted(str(id_) for id_ in rows(url, "archive"))


async def settle(url: str, queue: str, bodies: list[Any]) -> None:
    pond = millpond.Millpond(url)
    await pond.publish_many(queue, bodies)
    store: Any = await pond.transport
    assert not await store.settle([Ack(claim.receipt) for claim in await store.claim([queue], limit=len(bodies))])
    await pond.close()


def opened(path: Path) -> Lake:
    return Lake.open(storage_of(path))


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


def test_files_are_by_day_and_not_by_queue(sqlite_url: str, tmp_path: Path) -> None:
    """However many queues there are, whatever their names."""
    fill(sqlite_url, [*HOSTILE, *WORSE], each=6)
    done = export(tmp_path / "lake", sqlite_url)
    assert done.files <= 4  # two tasks, and perhaps two days
    for file in files(tmp_path / "lake"):
        path = Path(file).relative_to(tmp_path / "lake")
        day, name = path.parts
        assert re.fullmatch(r"day=\d{4}-\d\d-\d\d", day) and re.fullmatch(r"[0-9a-f]{32}\.parquet", name)
    for queue in (*HOSTILE, *WORSE):
        found = [
            row for file in files(tmp_path / "lake", queue=queue) for row in pq.ParquetFile(file).read().to_pylist()
        ]
        assert {row["queue"] for row in found} >= {queue}


def test_each_export_takes_what_is_new(url: str, tmp_path: Path) -> None:
    for n in range(4):
        if n != 2:
            fill(url, ["orders", "other"])
        done = export(tmp_path / "lake", url)
        assert (done.files == 0) == (n == 2)
        assert ids(lake_rows(tmp_path / "lake")) == archived(url)
    # Nothing new, no entry: an idle lake does not grow.
    before = opened(tmp_path / "lake").version
    one = exporter(tmp_path / "lake", url)
    for _ in range(3):
        one.export()
    one.close()
    assert opened(tmp_path / "lake").version == before


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
    entries = sorted((tmp_path / "lake" / "_delta_log").glob("*.json"))
    entries[-1].unlink()
    with pytest.raises(LakeDamaged, match="older copy"):
        export(tmp_path / "lake", sqlite_url)


def test_two_at_once(url: str, tmp_path: Path) -> None:
    """An export that another one overtakes plans anew, and commits only the rest."""
    fill(url, ["orders"])
    first, second = (exporter(tmp_path / "lake", url) for _ in range(2))
    overtaken = []

    def overtake(done: Any) -> Any:
        def close(self: Any, *args: Any) -> Any:
            if self is first and not overtaken:
                overtaken.append(second.export().rows)
                fill(url, ["more"])
            return done(self, *args)

        return close

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Exporter, "_plan", overtake(Exporter._plan))
        done = first.export()
    assert overtaken == [4] and done.rows == 4
    assert first.export().rows == second.export().rows == 0
    first.close()
    second.close()
    assert in_lake(tmp_path / "lake") == archived(url)


def test_one_that_is_overtaken_after_it_read_the_log(sqlite_url: str, tmp_path: Path) -> None:
    """The log is not taken for one that was restored from an older copy; for a purge neither."""
    fill(sqlite_url, ["orders"])
    first, second = (exporter(tmp_path / "lake", sqlite_url) for _ in range(2))
    second.export()
    enter = Exporter._enter

    def overtaken(self: Any, lake: Any) -> None:
        if self is first and waiting:
            waiting.pop()
            fill(sqlite_url, ["more"])
            assert second.export().rows == 4
        enter(self, lake)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Exporter, "_enter", overtaken)
        waiting = [1, 2]
        assert first.export().rows == 0
        waiting = [1]
        assert first.purge(older_than=0) == 16
    first.close()
    second.close()
    assert archived(sqlite_url) == [] and len(set(in_lake(tmp_path / "lake"))) == 16


def test_one_that_is_overtaken_each_time_gives_up(sqlite_url: str, tmp_path: Path) -> None:
    fill(sqlite_url, ["orders"])
    first, second = (exporter(tmp_path / "lake", sqlite_url) for _ in range(2))
    open_, plan = Exporter.open, Exporter._plan

    def opened_then_filled(self: Any) -> Any:
        lake = open_(self)
        if self is first:
            fill(sqlite_url, ["more"])
        return lake

    def planned_then_overtaken(self: Any, *args: Any) -> Any:
        found = plan(self, *args)
        if self is first:
            second.export()
        return found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Exporter, "open", opened_then_filled)
        patch.setattr(Exporter, "_plan", planned_then_overtaken)
        with pytest.raises(LakeFenced, match="one export of a database at a time"):
            first.export()
    first.close()
    second.close()
    assert in_lake(tmp_path / "lake") == archived(sqlite_url)


def test_a_bound_for_the_connections_of_executors(sqlite_url: str, tmp_path: Path) -> None:
    fill(sqlite_url, ["orders"])
    export(tmp_path / "lake", sqlite_url)
    fill(sqlite_url, ["orders"])
    here = Here()
    one = exporter(tmp_path / "lake", sqlite_url, connections=1)
    one._spark = here  # type: ignore[assignment]
    one.export()
    one.close()
    assert here.tasks == 1 and ids(lake_rows(tmp_path / "lake")) == archived(sqlite_url)


def test_a_number_beyond_every_type_spoils_no_other_value() -> None:
    huge = b"9" * 5000
    payloads = [b'{"sku":1,"x":1e999}', b'{"sku":2,"x":-%s}' % huge, b'{"note":"1e999","sku":[1e999]}', b'{"x":1e999']
    rows = pa.record_batch({"payload": pa.array(payloads, pa.binary())})
    body, unreadable = Decoder({"sku": "bigint", "x": "double", "note": "string"})(rows)
    empty = {"sku": None, "x": None, "note": None}
    assert body.to_pylist() == [{**empty, "sku": 1}, {**empty, "sku": 2}, {**empty, "note": "1e999"}, None]
    first, second, third, last = unreadable.to_pylist()
    assert (first, third, last) == ('{"x":"1e999"}', '{"sku":["1e999"]}', NO_OBJECT)
    assert second.startswith('{"x":"') and len(second) < 1100
    text, _ = Decoder({"x": "string"})(rows)
    assert text.to_pylist()[0] == {"x": "1e999"}


NUMBER = b'{"a":1e999,"b":"'
"""The beginning of a body whose tokens are searched for numbers that are out of range."""


def test_a_string_that_does_not_end_costs_as_much_as_one_that_does() -> None:
    """Every quotation mark in it was tried as a beginning: this body would have taken a day."""
    bodies = [NUMBER + b'\\"' * 1_000_000, NUMBER + b'\\"' * 1000 + b"\\", NUMBER + b'\\"' * 1_000_000 + b'"}']
    rows = pa.record_batch({"payload": pa.array(bodies, pa.binary())})
    body, unreadable = Decoder({"a": "string"})(rows)
    assert unreadable.to_pylist() == [NO_OBJECT, NO_OBJECT, None]
    assert body.to_pylist() == [None, None, {"a": "1e999"}]


def test_a_long_string_costs_little_memory() -> None:
    payload = NUMBER + b"x" * 2_000_000 + b'"}'
    tracemalloc.start()
    try:
        assert infer_fields([payload], {}) == {"a": "string", "b": "string"}
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 20 * len(payload)


def test_a_hostile_body_takes_few_columns() -> None:
    """For ever, because a field is never removed."""
    usual = [b'{"sku":1,"note":"x"}'] * 300

    def hostile(number: int, fields: int = 500) -> bytes:
        return msgspec.json.encode({f"!{number}-{n}": n for n in range(fields)})

    known: dict[str, str] = {}
    for number in range(4):
        known |= infer_fields([*usual, hostile(number)], known)
        assert len(known) == 50 and known["sku"] == "bigint" and known["note"] == "string"
    # A body with more fields than a lake may have adds none. The other columns are for the fields of most bodies.
    assert infer_fields([b'{"new":1}', b'{"new":1}', *[hostile(9, 501)] * 5], known) == {"new": "bigint"}
    wide = [msgspec.json.encode({f"z{n:03}": 1 for n in range(400)})] * 3
    wider = [msgspec.json.encode({f"a{n:03}": 1 for n in range(400)})] * 2
    found = list(infer_fields([*wider, *wide], known))
    assert len(found) == 450 and found[:400] == [f"z{n:03}" for n in range(400)] and found[-1] == "a049"


def test_names_that_spark_takes_for_one_are_one_field() -> None:
    """Not only by lower case: the long s is an S in upper case, and the dotted I an i in lower case."""
    assert infer_fields([b'{"id":1}', '{"\u0130d":2}'.encode()], {}) == {"id": "bigint"}
    assert infer_fields([b'{"sku":1}', '{"\u017fku":2}'.encode()], {}) == {"sku": "bigint"}
    rows = pa.record_batch({"payload": pa.array(['{"\u017fKU":2}'.encode()], pa.binary())})
    assert Decoder({"sku": "bigint"})(rows)[0].to_pylist() == [{"sku": 2}]


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
    unreadable = {row["payload"]: row["unreadable"] for row in lake_rows(path)}
    assert unreadable[b'{"sku":2.5}'] == '{"sku":2.5}' and unreadable[b'{"sku":true}'] == '{"sku":true}'
    assert unreadable[b"[1]"] == NO_OBJECT and unreadable[b'{"sku":7,"note":"x","tags":[1]}'] is None
    # A lake keeps decoding its fields; a field may be added, and keeps its type.
    asyncio.run(settle(sqlite_url, "orders", [{"sku": 8, "price": 1, "tags": [1, "a"]}, {"price": 2.5, "gone": None}]))
    export(path, sqlite_url, decode="infer")
    assert opened(path).body == {"sku": "bigint", "note": "string", "price": "double", "tags": "string"}
    asyncio.run(settle(sqlite_url, "orders", [{"sku": 9, "price": 3}]))
    export(path, sqlite_url)
    bodies = {row["payload"]: row["body"] for row in lake_rows(path)}
    assert bodies[b'{"sku":8,"price":1,"tags":[1,"a"]}'] == {"sku": 8, "note": None, "price": 1.0, "tags": '[1,"a"]'}
    assert bodies[b'{"sku":9,"price":3}'] == {"sku": 9, "note": None, "price": 3.0, "tags": None}
    for wrong in ("sku string", "sku", "sku decimal(3)"):
        with pytest.raises(InvalidOption):
            export(path, sqlite_url, decode=wrong)
    # Files with and without the field are merged.
    assert compact(Here(), path).written == 1  # type: ignore[arg-type]
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
    orphan = Path(old[0]).with_name("0123.parquet")
    orphan.write_bytes(b"of a task that was killed")
    done = compact(Here(), path)  # type: ignore[arg-type]
    assert (done.replaced, done.written, done.deleted) == (len(old), 1, 0)
    assert len(files(path)) == 1 and ids(lake_rows(path)) == archived(sqlite_url)
    assert all(os.path.exists(file) for file in old), "a reader may have begun with them"
    assert orphan.exists(), "an export that is running may have written it"
    done = compact(Here(), path, keep=timedelta(0))  # type: ignore[arg-type]
    assert (done.replaced, done.written, done.deleted) == (0, 0, len(old) + 1)
    assert not any(os.path.exists(file) for file in (*old, orphan))
    fill(sqlite_url, ["orders"])
    export(path, sqlite_url)
    assert ids(lake_rows(path)) == archived(sqlite_url)


def test_a_compaction_that_exports_overtake(sqlite_url: str, tmp_path: Path) -> None:
    path = tmp_path / "lake"
    for _ in range(3):
        fill(sqlite_url, ["orders"])
        export(path, sqlite_url)
    real = Lake.replace
    overtaken = 0

    def replace(self: Lake, *args: Any) -> None:
        nonlocal overtaken
        if overtaken < 3:
            overtaken += 1
            fill(sqlite_url, ["more"])
            export(path, sqlite_url)
        real(self, *args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Lake, "replace", replace)
        assert compact(Here(), path).replaced >= 3  # type: ignore[arg-type]
    assert overtaken == 3 and ids(lake_rows(path)) == archived(sqlite_url)


def test_files_of_others_stay(sqlite_url: str, tmp_path: Path) -> None:
    """Reports in the lake's folder, and files of a lake of an earlier version, which its readers still use."""
    path = tmp_path / "lake"
    fill(sqlite_url, ["orders"])
    export(path, sqlite_url)
    (day,) = {Path(one).parent for one in files(path)}
    theirs = [path / "report" / "by_queue.parquet", path / "orders" / "2026-11-16" / "a.parquet", path / "mine.parquet"]
    for one in (*theirs, day / "orphan.parquet"):
        one.parent.mkdir(parents=True, exist_ok=True)
        one.write_bytes(b"")
    assert compact(Here(), path, fewest=99, keep=timedelta(0)).deleted == 1  # type: ignore[arg-type]
    assert all(one.exists() for one in theirs) and not (day / "orphan.parquet").exists()


class Clocks:
    """The clocks of a machine that is suspended, or a process that is stopped, for four days at a point."""

    def __init__(self, *passing: str) -> None:
        self.passing = passing
        self.days = 0

    def monotonic(self) -> float:
        return 86_400.0 * self.days * ("monotonic" in self.passing)

    def now(self) -> int:
        return 86_400 * SECOND * self.days * ("wall" in self.passing)

    def sleeping(self, work: Callable[..., Any]) -> Callable[..., Any]:
        def slept(*args: Any, **kwargs: Any) -> Any:
            self.days += 4
            return work(*args, **kwargs)

        return slept


@pytest.mark.parametrize("clocks", [Clocks("monotonic"), Clocks("wall")], ids=["stopped", "suspended"])
def test_what_rested_for_days_is_not_committed(
    clocks: Clocks, sqlite_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Meanwhile another compaction deletes the files that no commit names."""
    path = tmp_path / "lake"
    for _ in range(2):
        fill(sqlite_url, ["orders"])
        export(path, sqlite_url)
    before = files(path)
    monkeypatch.setattr(table, "monotonic", clocks.monotonic)
    monkeypatch.setattr(table, "SystemClock", lambda: clocks)
    for name in ("compact", "export"):  # functions of the same names hide the modules
        module: Any = sys.modules[f"millpond.spark.lake.{name}"]
        monkeypatch.setattr(module, "check_written", clocks.sleeping(module.check_written))
    with pytest.raises(LakeChanged, match="took more than 84 hours"):
        compact(Here(), path)  # type: ignore[arg-type]
    fill(sqlite_url, ["orders"])
    with pytest.raises(LakeFenced, match="took more than 84 hours"):
        export(path, sqlite_url)
    assert files(path) == before


@pytest.mark.parametrize("kind", ["sqlite", "mariadb"])
def test_text_that_is_no_utf8(kind: str, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    """Another program can write it there. MariaDB takes half of a surrogate pair."""
    url = empty_database(request, kind)
    fill(url, ["orders"])
    bad = "CAST(x'EDA080' AS TEXT)" if kind == "sqlite" else "x'EDA080'"
    key = "key" if kind == "sqlite" else "`key`"
    execute(url, f"UPDATE millpond_archive SET headers = {bad}, error = {bad}, {key} = {bad} WHERE reason IS NULL")
    assert export(tmp_path / "lake", url).rows == 4
    found = lake_rows(tmp_path / "lake")
    assert Counter((row["headers"], row["key"], row["error"]) for row in found)[("\\xed\\xa0\\x80",) * 3] == 2
    assert len(by_duckdb(tmp_path / "lake")) == 4


def test_a_body_that_is_a_number(sqlite_url: str, tmp_path: Path) -> None:
    """Another program can write it into SQLite."""
    fill(sqlite_url, ["orders"])
    execute(sqlite_url, "UPDATE millpond_archive SET payload = 75")
    assert export(tmp_path / "lake", sqlite_url, decode="infer").rows == 4
    assert {row["payload"] for row in lake_rows(tmp_path / "lake")} == {b"75"}


def test_no_json_at_all(sqlite_url: str, tmp_path: Path) -> None:
    async def binary() -> None:
        store: Any = await millpond.connect(sqlite_url)
        await store.publish([Message(queue="q", payload=bytes([n, 255])) for n in range(5)])
        await store.settle([Ack(claim.receipt) for claim in await store.claim(["q"], limit=5)])
        await store.close()

    asyncio.run(binary())
    export(tmp_path / "lake", sqlite_url, decode="infer")
    assert ids(lake_rows(tmp_path / "lake")) == archived(sqlite_url)
    assert opened(tmp_path / "lake").body == {}


def test_a_shard_that_does_not_answer_leaves_no_connection_open(
    sqlite_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither of the other shards, nor after the next try of a schedule."""
    open_stores: list[str] = []

    class Store:
        def __init__(self, url: str) -> None:
            self.url = url
            open_stores.append(url)

        async def close(self) -> None:
            open_stores.remove(self.url)

    async def connect(url: str, **_: object) -> Store:
        await asyncio.sleep(0)
        if "gone" in url:
            raise StoreError("no answer")
        return Store(url)

    one = exporter(tmp_path / "lake", sqlite_url)
    (shard,) = one._shards
    one._shards = [shard, replace(shard, number=1, url=Url("sqlite:///gone.db"))]
    monkeypatch.setattr(sys.modules[Exporter.__module__], "connect", connect)
    for _ in range(2):
        with pytest.raises(StoreError, match="no answer"):
            one.export()
        assert open_stores == []
    one.close()


@pytest.mark.parametrize("at", ["connecting", "entering", "waiting", "planning"])
def test_a_shard_that_does_not_answer_delays_its_own_messages_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at: str
) -> None:
    urls = [f"sqlite:///{tmp_path / name}.db" for name in ("a", "b")]
    for _ in range(2):
        for url in urls:
            fill(url, ["orders"])
        if not (tmp_path / "lake").exists():
            export(tmp_path / "lake", " ".join(urls))
    everything = sorted(id_ for url in urls for id_ in archived(url))
    one = exporter(tmp_path / "lake", " ".join(urls))
    module = sys.modules[Exporter.__module__]
    real_connect, real_open, real_reader = module.connect, DatabaseExports.open, SparkShard.open_reader

    async def connect(url: str, **options: Any) -> Any:
        if url in gone:
            raise Unreachable("no answer")
        return await real_connect(url, **options)

    async def enter(self: Any, lake: str, **given: Any) -> Any:
        if urls[given["shard"]] in gone:
            raise Unreachable("no answer") if at == "entering" else TimeoutError
        return await real_open(self, lake, **given)

    def open_reader(shard: SparkShard) -> Any:
        if shard.url.raw in gone:
            raise Unreachable("no answer")
        return real_reader(shard)

    gone = urls[1:]
    exported_before = 4 if at == "planning" else 0  # a purge needs no reader
    with monkeypatch.context() as patch:
        if at == "connecting":
            patch.setattr(module, "connect", connect)
        elif at == "planning":
            patch.setattr(SparkShard, "open_reader", open_reader)
        else:
            patch.setattr(DatabaseExports, "open", enter)
        done = one.export()
        assert (done.rows, list(done.away), list(done.until_us)) == (4, [1], [0, 1])
        assert f"shard 1 was left out: {done.away[1]}" in summary(done) and "answer" in done.away[1]
        assert one.purge(older_than=0) == 8 + exported_before
        gone = urls
        other = exporter(tmp_path / "lake", " ".join(urls))
        with pytest.raises(StoreUnavailable, match="answer"):
            other.export()
        other.close()
    assert one.export().rows == 4 and one.purge(older_than=0) == 8 - exported_before
    one.close()
    assert in_lake(tmp_path / "lake") == everything
