"""The columns that Spark sees, once: their names, types and order, and where the tables keep them.

`payload` is the body as bytes; `headers` is JSON text, or null without headers (`from_json` reads it); `shard`
is the place of the message's database among the URLs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from pyspark.sql.types import BinaryType, DataType, IntegerType, StringType, StructField, StructType, TimestampType

from millpond.errors import InvalidOption
from millpond.spark.options import BATCH_OPTIONS, Options
from millpond.transports.database.fetch.columns import Column, Kind

_TYPES: Mapping[Kind, DataType] = {
    Kind.ID: StringType(),
    Kind.TEXT: StringType(),
    Kind.STATE: StringType(),
    Kind.NUMBER: IntegerType(),
    Kind.BYTES: BinaryType(),
    Kind.MOMENT: TimestampType(),
}

_COMMON = (
    Column("id", Kind.ID, "{id_out}"),
    Column("queue", Kind.TEXT, "queue"),
    Column("key", Kind.TEXT, "{key}"),
    Column("priority", Kind.NUMBER, "priority"),
    Column("payload", Kind.BYTES, "payload"),
    Column("headers", Kind.TEXT, "headers"),
    Column("deliveries", Kind.NUMBER, "deliveries"),
    Column("created_at", Kind.MOMENT, "created_at"),
    Column("due_at", Kind.MOMENT, "due_at"),
)
_MORE = (
    Column("state", Kind.STATE, "state"),
    Column("attempts", Kind.NUMBER, "attempts"),
    Column("first_attempt_at", Kind.MOMENT, "first_attempt_at"),
    Column("last_attempt_at", Kind.MOMENT, "last_attempt_at"),
    Column("acquired_at", Kind.MOMENT, "acquired_at"),
    Column("expires_at", Kind.MOMENT, "expires_at"),
)


def _shard(number: int) -> Column:
    return Column("shard", Kind.NUMBER, str(number))


def stream_columns(shard: int = 0) -> list[Column]:
    """Of a stream, as they are fetched from one shard."""
    return [*_COMMON, Column("claimed_at", Kind.MOMENT, "acquired_at"), _shard(shard)]


def batch_columns(table: str, shard: int = 0) -> list[Column]:
    """Of a table, `messages` or `archive`, as they are fetched from one shard."""
    own = {
        "messages": [Column("last_error", Kind.TEXT, "last_error")],
        "archive": [
            Column("reason", Kind.TEXT, "reason"),
            Column("error", Kind.TEXT, "error"),
            Column("archived_at", Kind.MOMENT, "archived_at"),
        ],
    }
    return [*_COMMON, *_MORE, *own[table], _shard(shard)]


def spark_schema(columns: Sequence[Column]) -> StructType:
    return StructType([StructField(column.name, _TYPES[column.kind]) for column in columns])


def chosen(columns: Sequence[Column], schema: StructType, of: str) -> list[Column]:
    """The columns that a schema asks for, in its order."""
    known = {column.name: column for column in columns}
    for field in schema.fields:
        column = known.get(field.name)
        if column is None:
            raise InvalidOption(f"{of} has no column {field.name!r}; there are {', '.join(known)}")
        if field.dataType != _TYPES[column.kind]:
            raise InvalidOption(
                f"the column {field.name!r} of {of} is of type {_TYPES[column.kind].simpleString()}, not "
                f"{field.dataType.simpleString()}; read it as it is and cast it"
            )
    return [known[field.name] for field in schema.fields]


def stream_schema(given: Mapping[str, str]) -> StructType:
    columns = stream_columns()
    # As Spark's Kafka source names it; there it is off, here headers are a column like others unless told.
    if str(given.get("includeHeaders", "true")).lower() == "false":
        columns = [column for column in columns if column.name != "headers"]
    return spark_schema(columns)


def batch_schema(given: Mapping[str, str]) -> StructType:
    """Every column of the table, or those of the option `columns`."""
    options = Options(given, BATCH_OPTIONS, of="a batch read")
    table = options.choice("table", ("messages", "archive"), "messages")
    every = batch_columns(table)
    names = options.names("columns")
    known = {column.name: column for column in every}
    for name in names:
        if name not in known:
            raise InvalidOption(f"the table {table!r} has no column {name!r}; there are {', '.join(known)}")
    return spark_schema([known[name] for name in dict.fromkeys(names)] if names else every)
