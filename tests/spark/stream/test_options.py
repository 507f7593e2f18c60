"""The options of a stream: errors are raised before any connection."""

from __future__ import annotations

import asyncio
import pickle

import pytest
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadMaxRows
from pyspark.sql.types import StringType, StructField, StructType

import millpond
from millpond.errors import InvalidOption, MillpondError
from millpond.spark.columns import spark_schema, stream_columns
from millpond.spark.source import MillpondSource
from millpond.spark.stream.driver import fair_shares
from millpond.spark.stream.reader import StreamReader

GOOD = {"url": "postgresql://u:secret@localhost/d", "queue": "q", "stream": "s"}


def reader(**options: str) -> StreamReader:
    return StreamReader({**GOOD, **options}, spark_schema(stream_columns()))


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"queue": ""}, "needs the option 'queue'"),
        ({"stream": ""}, "needs the option 'stream'"),
        ({"url": "memory://"}, "memory:// is none"),
        ({"url": "amqp://127.0.0.1/v"}, "amqp:// is none. Give the database of archive= instead"),
        ({"ackMode": "never"}, "'ackMode' must be one of commit, manual"),
        ({"unsettled": "ack"}, "'unsettled' is for ackMode=manual"),
        ({"ackMode": "manual", "unsettled": "reject"}, "one of ack, nack, fail"),
        ({"maxMessagesPerTrigger": "0"}, "from 1 to"),
        ({"maxMessagesPerTrigger": "5", "maxOffsetsPerTrigger": "5"}, "are one option"),
        (
            {"maxConnections": "1", "url": "sqlite:///a sqlite:///b"},
            "the option 'url' names 2 databases",
        ),
        ({"idleTimeout": "0s"}, "must be a time"),
        ({"subscribe": "orders"}, "'subscribe' is an option of Kafka's source; a stream has none: name the queue"),
        ({"startingOffsets": "earliest"}, "delivers every message that waits"),
        ({"kafka.bootstrap.servers": "h:1"}, "name the database by the option 'url'"),
        ({"kafka.max.poll.records": "5"}, "leave it out"),
        ({"maxMessages": "5"}, "the nearest one is"),
        ({"minMessagesPerTrigger": "20000"}, "more than 'maxMessagesPerTrigger', 10,000"),
        ({"maxTriggerDelay": "5m"}, "'maxTriggerDelay' needs 'minMessagesPerTrigger'"),
        ({"minOffsetsPerTrigger": "5", "maxTriggerDelay": "soon"}, "like 90s, 15m or 1h, not 'soon'"),
        ({"maxBytesPerTrigger": "0"}, "from 1 to"),
        ({"failOnDataLoss": "perhaps"}, "must be true or false"),
    ],
)
def test_what_is_wrong_is_said(options: dict[str, str], says: str) -> None:
    with pytest.raises(MillpondError, match=says) as caught:
        reader(**options)
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"url": "sqlite:///x", "queue": "orders"}, r"""\.option\("stream", "…"\).*\.where\("queue = 'orders'"\)"""),
        ({"url": "sqlite:///x", "ackmode": "manual"}, "'ackMode' is for a stream"),
        ({**GOOD, "maxMessages": "5"}, "the nearest one is"),
        ({**GOOD, "table": "archive"}, "either the option 'stream'"),
    ],
)
def test_mistakes_are_found_at_load(options: dict[str, str], says: str) -> None:
    with pytest.raises(MillpondError, match=says):
        MillpondSource(options).schema()


def test_trigger_once_warns_that_it_delivers_one_batch(sqlite_url: str, caplog: pytest.LogCaptureFixture) -> None:
    asyncio.run(migrate(sqlite_url))
    one = reader(url=sqlite_url)
    start = one.initialOffset()
    assert one.latestOffset(start, ReadMaxRows(5)) == start
    assert "availableNow=True" not in caplog.text
    assert one.latestOffset(start, ReadAllAvailable()) == start
    assert "availableNow=True" in caplog.text
    one.stop()


async def migrate(url: str) -> None:
    await (await millpond.connect(url, migrate=True)).close()


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
    assert fair_shares(limit, wants, first=0) == shares
    assert sum(shares) == limit


def test_shards_take_turns_where_there_is_too_little() -> None:
    assert [fair_shares(1, [9, 9, 9], first=n) for n in range(3)] == [[1, 0, 0], [0, 1, 0], [0, 0, 1]]
