"""The columns that Spark sees: names, types, order, and their expressions in SQL.

`payload` is the body as bytes; `headers` is JSON text, or null without headers (`from_json` reads it); `shard` is the
position of the message's database among the URLs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from pyspark.sql.types import BinaryType, DataType, IntegerType, StringType, StructField, StructType, TimestampType

from millpond.errors import InvalidOption
from millpond.seam.arrow import Column, Kind
from millpond.spark.options import BATCH_OPTIONS, SparkOptions

_TYPES: Mapping[Kind, DataType] = {
    Kind.ID: StringType(),
    Kind.TEXT: StringType(),
    Kind.STATE: StringType(),
    Kind.NUMBER: IntegerType(),
    Kind.BYTES: BinaryType(),
    Kind.TIME: TimestampType(),
}

_COMMON = (
    Column("id", Kind.ID, "{id_out}"),
    Column("queue", Kind.TEXT, "queue"),
    Column("key", Kind.TEXT, "{key}"),
    Column("priority", Kind.NUMBER, "priority"),
    Column("payload", Kind.BYTES, "{body}"),
    Column("headers", Kind.TEXT, "headers"),
    Column("deliveries", Kind.NUMBER, "deliveries"),
    Column("created_at", Kind.TIME, "created_at"),
    Column("due_at", Kind.TIME, "due_at"),
)
_MORE = (
    Column("state", Kind.STATE, "state"),
    Column("attempts", Kind.NUMBER, "attempts"),
    Column("first_attempt_at", Kind.TIME, "first_attempt_at"),
    Column("last_attempt_at", Kind.TIME, "last_attempt_at"),
    Column("acquired_at", Kind.TIME, "acquired_at"),
    Column("expires_at", Kind.TIME, "expires_at"),
)


def _shard(number: int) -> Column:
    return Column("shard", Kind.NUMBER, str(number))


def stream_columns(shard: int = 0) -> list[Column]:
    """The columns of a stream, read from one shard."""
    return [*_COMMON, Column("claimed_at", Kind.TIME, "acquired_at"), _shard(shard)]


def batch_columns(table: str, shard: int = 0) -> list[Column]:
    """The columns of a table, `messages` or `archive`, read from one shard."""
    own = {
        "messages": [Column("crashes", Kind.NUMBER, "crashes"), Column("last_error", Kind.TEXT, "last_error")],
        "archive": [
            Column("reason", Kind.TEXT, "reason"),
            Column("error", Kind.TEXT, "error"),
            Column("archived_at", Kind.TIME, "archived_at"),
        ],
    }
    return [*_COMMON, *_MORE, *own[table], _shard(shard)]


def spark_schema(columns: Sequence[Column]) -> StructType:
    return StructType([StructField(column.name, _TYPES[column.kind]) for column in columns])


def select_columns(columns: Sequence[Column], schema: StructType, of: str) -> list[Column]:
    """The columns that a schema names, in its order."""
    found = named_columns(columns, schema.names, of)
    for column, field in zip(found, schema.fields, strict=True):
        if field.dataType != _TYPES[column.kind]:
            raise InvalidOption(
                f"the column {field.name!r} of {of} is of type {_TYPES[column.kind].simpleString()}, not "
                f"{field.dataType.simpleString()}; read it as it is and cast it"
            )
    return found


def named_columns(columns: Sequence[Column], names: Sequence[str], of: str) -> list[Column]:
    known = {column.name: column for column in columns}
    for name in names:
        if name not in known:
            raise InvalidOption(f"{of} has no column {name!r}; there are {', '.join(known)}")
    return [known[name] for name in names]


def stream_schema(given: Mapping[str, str]) -> StructType:
    columns = stream_columns()
    # The name is that of Spark's Kafka source. There the default is false; here headers are a column like others.
    if str(given.get("includeHeaders", "true")).lower() == "false":
        columns = [column for column in columns if column.name != "headers"]
    return spark_schema(columns)


def batch_schema(given: Mapping[str, str]) -> StructType:
    """Every column of the table, or those of the option `columns`."""
    options = SparkOptions(given, BATCH_OPTIONS, of="a batch read")
    table = options.choice("table", ("messages", "archive"), "messages")
    every = batch_columns(table)
    names = options.names("columns")
    return spark_schema(named_columns(every, names, f"the table {table!r}") if names else every)
