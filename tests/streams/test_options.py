"""The options of a stream: what is wrong with them is said before anything is connected."""

from __future__ import annotations

import pickle

import pytest
from pyspark.sql.streaming.datasource import ReadMaxRows
from pyspark.sql.types import StringType, StructField, StructType

from millpond.errors import InvalidOption, MillpondError
from millpond.spark.driver import shared_out
from millpond.spark.schema import spark_schema, stream_columns
from millpond.spark.stream import StreamReader

GOOD = {"url": "postgresql://u:secret@localhost/d", "queue": "q", "stream": "s"}


def reader(**options: str) -> StreamReader:
    return StreamReader({**GOOD, **options}, spark_schema(stream_columns()))


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"queue": ""}, "needs the option 'queue'"),
        ({"stream": ""}, "needs the option 'stream'"),
        ({"url": "memory://"}, "memory:// is none"),
        ({"ackMode": "never"}, "'ackMode' must be one of commit, manual"),
        ({"unsettled": "ack"}, "'unsettled' is for ackMode=manual"),
        ({"ackMode": "manual", "unsettled": "reject"}, "one of ack, nack, fail"),
        ({"maxMessagesPerTrigger": "0"}, "from 1 to"),
        ({"maxMessagesPerTrigger": "5", "maxOffsetsPerTrigger": "5"}, "are one option"),
        ({"maxMessages": "5"}, "did you mean"),
        ({"failOnDataLoss": "perhaps"}, "must be true or false"),
    ],
)
def test_what_is_wrong_is_said(options: dict[str, str], says: str) -> None:
    with pytest.raises(MillpondError, match=says) as caught:
        reader(**options)
    assert "secret" not in str(caught.value)


def test_a_column_that_a_stream_does_not_have() -> None:
    with pytest.raises(InvalidOption, match="no column 'archived_at'"):
        StreamReader(GOOD, StructType([StructField("archived_at", StringType())]))


def test_the_limit_is_what_was_asked_for() -> None:
    assert reader().getDefaultReadLimit() == ReadMaxRows(10_000)
    assert reader(maxOffsetsPerTrigger="7").getDefaultReadLimit() == ReadMaxRows(7)


def test_a_reader_travels_to_tasks_before_it_is_used() -> None:
    pickle.loads(pickle.dumps(reader()))  # noqa: S301 - as Spark does


@pytest.mark.parametrize(
    ("limit", "wants", "shares"),
    [
        (100, [1000], [100]),
        (100, [1000, 1000], [50, 50]),
        (100, [1000, 10, 0], [90, 10, 0]),
        (100, [99, 1, 0], [99, 1, 0]),
        (100, [0, 0, 0], [34, 33, 33]),
        (10, [3, 3], [5, 5]),
        (7, [100, 100, 100], [3, 2, 2]),
        (2, [5, 5, 5], [1, 1, 0]),
    ],
)
def test_shards_share_a_limit(limit: int, wants: list[int], shares: list[int]) -> None:
    assert shared_out(limit, wants, first=0) == shares
    assert sum(shares) == limit


def test_shards_take_turns_where_there_is_too_little() -> None:
    assert [shared_out(1, [9, 9, 9], first=n) for n in range(3)] == [[1, 0, 0], [0, 1, 0], [0, 0, 1]]
