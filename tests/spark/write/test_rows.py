"""Rows become messages, or an error names the row and the reason. No JVM is needed."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any
from uuid import uuid4

import pyarrow as pa
import pytest
from pyspark.sql.pandas.types import from_arrow_schema

from millpond.errors import MillpondError
from millpond.message import id_of
from millpond.spark.write.lots import route_rows
from millpond.spark.write.messages import layout, messages, new_ids, without_copies
from millpond.transports.routing import ring_point, shard_of

LIMIT = 1000


def made(batch: pa.RecordBatch, queue: str | None = "q", limit: int = LIMIT) -> pa.RecordBatch:
    return messages(layout(from_arrow_schema(batch.schema), queue), batch, limit)


NAIVE = datetime(2026, 1, 1)


@pytest.mark.parametrize(
    ("columns", "queue", "complaint"),
    [
        ({"payload": "x"}, None, "option 'queue' or a column 'queue'; there is neither"),
        ({"payload": "x", "queue": "q"}, "q", "there are both"),
        ({"payload": "x", "queue": pa.scalar(None, pa.string())}, None, "a row has no queue"),
        ({"payload": "x", "queue": " q"}, None, "white space"),
        ({"payload": "x", "queue": "a\x00"}, None, "NUL"),
        ({"payload": "x", "queue": "q" * 256}, None, "the limit is 255"),
        ({"payload": "x", "queue": 7}, None, "'queue' must be string; it is bigint"),
        ({"payload": "x", "key": "a\x00"}, "q", "NUL"),
        ({"payload": "x", "key": "k" * 256}, "q", "the limit is 255"),
        ({"payload": pa.scalar(None, pa.binary())}, "q", "must not be null"),
        ({"payload": "x" * (LIMIT + 1)}, "q", "1,001 bytes, the limit is 1,000"),
        ({"payload": 7}, "q", "must be binary or string"),
        ({"payload": "x", "more": 1, "still": 2}, "q", "'more', 'still' have no meaning"),
        ({"payload": "x", "Payload": "y"}, "q", "two columns 'payload'"),
        ({"payload": "x", "priority": 101}, "q", "holds 101"),
        ({"payload": "x", "priority": -1}, "q", "holds -1"),
        ({"payload": "x", "priority": "5"}, "q", "it is string"),
        ({"payload": "x", "priority": 5.0}, "q", "it is double"),
        ({"payload": "x", "due_at": NAIVE}, "q", "without a time zone"),
        ({"payload": "x", "due_at": NAIVE.date()}, "q", "it is date"),
        ({"payload": "x", "id": "no"}, "q", "'no' is not a UUID"),
        ({"payload": "x", "id": b"short"}, "q", "16 bytes"),
        ({"payload": "x", "headers": "[1]"}, "q", "must be a JSON object"),
        ({"payload": "x", "headers": "{"}, "q", "not JSON"),
        ({"payload": "x", "headers": '{"a": "%s"}' % ("x" * 70_000)}, "q", "the limit is 65,536"),
        ({"key": "k"}, "q", "no column for the body"),
        ({"key": "k", "value": "x"}, "q", "rename it to 'payload'"),
    ],
)
def test_what_cannot_be_published_is_refused(columns: dict[str, Any], queue: str | None, complaint: str) -> None:
    arrays = {k: pa.array([v.as_py()], v.type) if isinstance(v, pa.Scalar) else [v] for k, v in columns.items()}
    with pytest.raises(MillpondError, match=complaint):
        made(pa.RecordBatch.from_pydict(arrays), queue)


def test_bytes_that_are_no_text_are_refused() -> None:
    bad = pa.Array.from_buffers(pa.string(), 1, [None, pa.py_buffer(b"\0\0\0\0\1\0\0\0"), pa.py_buffer(b"\xff")])
    for column in ("key", "queue"):
        with pytest.raises(MillpondError, match="not UTF-8"):
            made(
                pa.RecordBatch.from_arrays([pa.array(["x"]), bad], ["payload", column]),
                None if column[0] == "q" else "q",
            )


def test_values_keep_their_meaning() -> None:
    id_ = uuid4()
    moment = datetime(2030, 1, 2, 3, 4, 5, 678, tzinfo=UTC)
    batch = pa.RecordBatch.from_pydict(
        {
            "ID": [str(id_), None],
            "priority": pa.array([None, 100], pa.int8()),
            "due_at": pa.array([moment, None], pa.timestamp("us", "UTC")),
            "headers": pa.array([[("a", "b")], []], pa.map_(pa.string(), pa.string())),
            "n": [1, 2],
            "tags": pa.array([[("x", 1)], None], pa.map_(pa.string(), pa.int64())),
        }
    )
    first, second = made(batch).to_pylist()
    assert id_of(first["id"]) == id_ and id_of(second["id"]).version == 7
    assert (first["priority"], second["priority"]) == (50, 100)
    assert (first["due_at"], second["due_at"]) == (round(moment.timestamp() * 1_000_000), None)
    assert (first["headers"], second["headers"]) == ('{"a":"b"}', None)
    assert (first["payload"], second["payload"]) == (b'{"n":1,"tags":{"x":1}}', b'{"n":2,"tags":null}')


def test_an_empty_batch_is_no_error() -> None:
    columns = {
        "payload": pa.array([], pa.string()),
        "queue": pa.array([], pa.string()),
        "id": pa.array([], pa.string()),
    }
    assert made(pa.RecordBatch.from_pydict(columns), None).num_rows == 0


def test_new_ids_are_those_of_uuid7_in_order() -> None:
    ids = new_ids(10_000).to_pylist()
    assert ids == sorted(ids) and len(set(ids)) == len(ids)
    assert all(id_of(id_).version == 7 and id_of(id_).variant == "specified in RFC 4122" for id_ in ids[::100])


def test_of_copies_the_first_stays() -> None:
    ids = new_ids(3).to_pylist()
    rows = pa.table({"id": pa.array([ids[1], ids[0], ids[1], ids[2]], pa.binary()), "n": [0, 1, 2, 3]})
    assert without_copies(rows).column("n").to_pylist() == [0, 1, 3]


def test_a_repeated_batch_goes_the_same_ways() -> None:
    """Also with other partitions: each row goes to the same shard again."""
    keys = ["a", "b", None, None, None] * 20
    payloads = [b"%d" % (n % 60) for n in range(100)]
    rows = made(pa.RecordBatch.from_pydict({"key": keys, "payload": pa.array(payloads, pa.binary())}))

    def ways(batches: list[pa.RecordBatch]) -> dict[int, list[tuple[str | None, bytes]]]:
        found: dict[int, list[tuple[str | None, bytes]]] = {}
        for batch in batches:
            for shard, some in route_rows(batch, 3, given=False):
                for row in some.to_pylist():
                    assert shard_of(ring_point(row["key"], row["id"]), 3) == shard, "found by whoever has its key or id"
                    found.setdefault(shard, []).append((row["key"], row["payload"]))
        return {shard: sorted(some, key=str) for shard, some in found.items()}

    again = made(pa.RecordBatch.from_pydict({"key": keys, "payload": pa.array(payloads, pa.binary())}))
    whole = ways([rows])
    assert whole == ways([again.slice(0, 37), again.slice(37)])
    assert sum(map(len, whole.values())) == 100


def test_given_ids_lead_to_their_shards() -> None:
    batch = pa.RecordBatch.from_pydict({"id": [str(uuid4()) for _ in range(50)], "payload": ["x"] * 50})
    rows = made(batch)
    found = {row["id"]: shard for shard, some in route_rows(rows, 4, given=True) for row in some.to_pylist()}
    assert found == {id_: shard_of(ring_point(None, id_), 4) for id_ in rows.column("id").to_pylist()}
