"""Arrow reads without Spark: every row once, exact types, filters with Spark's meaning."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID

import msgspec
import psycopg
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from psycopg.rows import dict_row
from pyspark.sql.datasource import (
    EqualTo,
    Filter,
    GreaterThan,
    GreaterThanOrEqual,
    In,
    IsNotNull,
    IsNull,
    LessThan,
    LessThanOrEqual,
    Not,
    StringContains,
)

from millpond.errors import AuthenticationFailed, NotMigrated, StoreError, UnknownDatabase, UnknownScheme, Unreachable
from millpond.seam.arrow import Condition, Operator, Read
from millpond.spark.columns import batch_columns
from millpond.spark.read import filters
from millpond.transports import open_reader
from millpond.transports.database.arrow.batches import select
from millpond.transports.database.arrow.reader import DatabaseReader
from millpond.transports.database.arrow.slices import SLICE_BYTES, count, ranges
from millpond.transports.database.postgres.pages import BLOCK_PAGES
from servers import PgBouncer, Postgres
from tests.spark.ponds import HOSTILE, fill, password, rows

TABLES = ("messages", "archive")


def read_table(url: str, table: str, **how: Any) -> pa.Table:
    with open_reader(url) as reader:
        return read_by(reader, table, **how)


def read_by(reader: DatabaseReader, table: str, conditions: Sequence[Condition] = (), **how: Any) -> pa.Table:
    columns = batch_columns(table)
    batches: list[pa.RecordBatch] = []
    for part in reader.slices(Read(table, conditions, **how)):
        batches += reader.read(part, columns)
    return pa.Table.from_batches(batches, pa.schema([(column.name, column.kind.arrow) for column in columns]))


def moment(us: int | None) -> datetime | None:
    return None if us is None else datetime(1970, 1, 1, tzinfo=UTC) + timedelta(microseconds=us)


@pytest.mark.parametrize("table", TABLES)
def test_every_row_once_and_as_it_is(filled_url: str, table: str) -> None:
    expected = rows(filled_url, table)
    found = read_table(filled_url, table).to_pylist()
    assert len(found) == len(expected) > 0
    for row in found:
        wanted = expected.pop(UUID(row["id"]))
        own = (
            {"reason": wanted.reason, "error": wanted.error, "archived_at": moment(wanted.archived_us)}
            if table == "archive"
            else {"crashes": wanted.crashes, "last_error": wanted.error}
        )
        assert msgspec.json.decode(row.pop("headers") or "{}") == wanted.headers
        assert row == {
            "id": str(wanted.id),
            "queue": wanted.queue,
            "key": wanted.key,
            "priority": wanted.priority,
            "payload": wanted.payload,
            "deliveries": wanted.deliveries,
            "created_at": moment(wanted.created_us),
            "due_at": moment(wanted.due_us),
            "state": wanted.state,
            "attempts": wanted.attempts,
            "first_attempt_at": moment(wanted.first_attempt_us),
            "last_attempt_at": moment(wanted.last_attempt_us),
            "acquired_at": moment(wanted.acquired_us),
            "expires_at": moment(wanted.expires_us),
            "shard": 0,
            **own,
        }
    assert not expected


COMPARISONS: dict[type[Filter], Callable[[Any, Any], bool]] = {
    EqualTo: operator.eq,
    LessThan: operator.lt,
    LessThanOrEqual: operator.le,
    GreaterThan: operator.gt,
    GreaterThanOrEqual: operator.ge,
    In: lambda value, among: value in among,
}


def holds(row: dict[str, Any], filter_: Any) -> bool:
    """Whether Spark would select the row."""
    value = row[filter_.attribute[0]]
    match filter_:
        case IsNull():
            return value is None
        case IsNotNull():
            return value is not None
    return value is not None and COMPARISONS[type(filter_)](value, filter_.value)


def any_filter(table: str) -> st.SearchStrategy[Filter]:
    now = datetime.now(UTC)
    values: dict[str, st.SearchStrategy[Any]] = {
        "queue": st.sampled_from([*HOSTILE, "none", "nul\0", "orders "]) | st.text(max_size=5),
        "key": st.sampled_from(["key 4 ü", "key 4 ü ", "KEY 4 Ü", ""]),
        "state": st.sampled_from(["PENDING", "PROCESSING", "RETRYABLE", "COMPLETED", "FAILED", "failed", "é"]),
        "priority": st.integers(-1, 12) | st.sampled_from([2**31 - 1, -(2**31)]),
        "deliveries": st.integers(0, 2),
        "attempts": st.integers(0, 2),
        "id": st.sampled_from(["01", "no id", "0" * 36, str(UUID(int=0)), str(UUID(int=2**128 - 1)), "F" * 36])
        | st.uuids().map(str),
        **dict.fromkeys(
            ("created_at", "due_at", "expires_at", "first_attempt_at", "acquired_at"),
            st.timedeltas(timedelta(seconds=-60), timedelta(seconds=60)).map(lambda t: now + t)
            | st.just(datetime(1969, 1, 1, tzinfo=UTC))
            | st.just(datetime(9999, 1, 1, tzinfo=UTC)),
        ),
    }
    if table == "archive":
        values["archived_at"] = values["created_at"]

    def on(name: str) -> st.SearchStrategy[Filter]:
        kinds = [kind for kind in COMPARISONS if kind is not In]
        compared = st.builds(lambda kind, value: kind((name,), value), st.sampled_from(kinds), values[name])
        among = st.lists(values[name], max_size=4).map(lambda found: In((name,), found))  # type: ignore[arg-type]
        null = st.sampled_from([IsNull((name,)), IsNotNull((name,))])
        return compared | among | null

    return st.sampled_from(sorted(values)).flatmap(on)


@pytest.mark.parametrize("table", TABLES)
def test_filters_mean_the_same_to_the_database(filled_url: str, table: str) -> None:
    reader = open_reader(filled_url)
    every = read_by(reader, table).to_pylist()
    columns = {column.name: column for column in batch_columns(table)}

    @settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck), database=None)
    @given(st.lists(any_filter(table), max_size=3))
    def check_some(chosen: list[Filter]) -> None:
        pushed = [(filter_, filters.condition(filter_, columns)) for filter_ in chosen]
        conditions = [found for _, found in pushed if found is not None]
        answer = {row["id"] for row in read_by(reader, table, conditions).to_pylist()}
        # A filter that Spark evaluates again may let through more rows, never fewer.
        exact = [filter_ for filter_, found in pushed if found is not None and filters.exact(found, columns)]
        loose = [filter_ for filter_, found in pushed if found is not None]
        assert answer <= {row["id"] for row in every if all(holds(row, filter_) for filter_ in exact)}
        assert answer >= {row["id"] for row in every if all(holds(row, filter_) for filter_ in loose)}

    with reader:
        check_some()


def test_what_is_left_to_spark() -> None:
    columns = {column.name: column for column in batch_columns("archive")}
    naive = datetime(2026, 1, 1)
    for filter_ in (
        Not(EqualTo(("queue",), "orders")),
        StringContains(("queue",), "o"),
        LessThan(("queue",), "orders"),
        EqualTo(("state",), "unknown"),
        EqualTo(("id",), "0189F"),
        EqualTo(("id",), "01890000-0000-7000-8000-00000000000A"),
        EqualTo(("shard",), 0),
        EqualTo(("payload",), b"x"),
        EqualTo(("created_at",), naive),
        EqualTo(("queue",), "\0"),
        EqualTo(("queue", "inner"), "x"),
        In(("priority",), ()),
        In(("priority",), tuple(range(5000))),
    ):
        assert filters.condition(filter_, columns) is None, filter_


@pytest.mark.parametrize("table", TABLES)
@pytest.mark.parametrize("parts", [1, 2, 7, 1000])
@pytest.mark.parametrize("snapshot", [True, False])
def test_slices_cover_every_row_once(filled_url: str, table: str, parts: int, snapshot: bool) -> None:
    found = read_table(filled_url, table, at_least=parts, snapshot=snapshot)
    assert sorted(found["id"].to_pylist()) == sorted(map(str, rows(filled_url, table)))


def test_ranges_leave_nothing_out() -> None:
    assert ranges(5, 5, 4) == [(None, None)]
    assert ranges(0, 9, 2) == [(None, 5), (5, None)]
    for low, high, parts in ((0, 2**128 - 1, 7), (-10, 10, 3), (0, 3, 100)):
        found = ranges(low, high, parts)
        assert len(found) <= parts
        assert found[0][0] is None and found[-1][1] is None
        assert all(a[1] == b[0] for a, b in itertools.pairwise(found))


def test_slices_are_shared_evenly() -> None:
    assert [count(size * SLICE_BYTES, 4) for size in (0, 1, 4, 5, 8, 9)] == [4, 4, 4, 8, 8, 12]
    assert [count(size, 1) for size in (0, SLICE_BYTES, SLICE_BYTES + 1)] == [1, 1, 2]


def test_no_read_stays_in_the_cache_of_statements(filled_url: str) -> None:
    """Spark's filters and column lists make ever new texts, and a Python worker lives for days."""
    columns = batch_columns("archive")
    with open_reader(filled_url) as reader:
        assert isinstance(reader, DatabaseReader)
        for n in range(20):
            conditions = [Condition("priority", Operator.ABOVE, n)] * (n % 3) + [
                Condition("queue", Operator.EQUAL, "")
            ] * n
            for part in reader.slices(Read("archive", conditions)):
                list(reader.read(part, columns[: 1 + n % 7]))
        assert len(reader.dialect._statements) == 0


@pytest.mark.parametrize("names", [["shard"], ["state"], ["priority", "key", "state"], ["expires_at"], ["attempts"]])
def test_some_columns_alone(filled_url: str, names: list[str]) -> None:
    for table in TABLES:
        columns = [column for column in batch_columns(table, 7) if column.name in names]
        with open_reader(filled_url) as reader:
            slices = reader.slices(Read(table))
            found = [row for part in slices for batch in reader.read(part, columns) for row in batch.to_pylist()]
            every = read_by(reader, table).to_pylist()
        wanted = [{column.name: row[column.name] for column in columns} for row in every]
        if names == ["shard"]:
            wanted = [{"shard": 7} for _ in every]
        assert sorted(map(str, found)) == sorted(map(str, wanted)) != []


_MANY = """
INSERT INTO millpond_archive (id, queue, key, priority, due_at, headers, payload, deliveries, attempts, created_at,
expires_at, first_attempt_at, last_attempt_at, acquired_at, state, reason, error, archived_at)
SELECT gen_random_uuid(), 'größe', CASE WHEN n % 3 > 0 THEN repeat('ü', n % 40) END, n % 101, n + n % 4 / 3,
CASE WHEN n % 5 = 0 THEN '{"n": 1}' END, decode(repeat(lpad(to_hex(n), 6, '0'), n % 200), 'hex'), 1, 1 - n % 9 / 8, n,
CASE WHEN n % 1000 = 0 THEN -n END, CASE WHEN n % 6 > 0 THEN n + n % 3 / 2 END,
CASE WHEN n % 8 > 0 THEN now - n % 2 END, CASE WHEN n % 7 > 0 THEN n END,
CASE WHEN n % 2 > 0 THEN 'FAILED' ELSE 'COMPLETED' END, 'why', CASE WHEN n % 2 > 0 THEN 'no' END, now
FROM generate_series(1, 30000) n, (SELECT (extract(epoch FROM now()) * 1000000)::bigint AS now) t
"""
_MOMENTS = ("created_at", "due_at", "expires_at", "first_attempt_at", "last_attempt_at", "acquired_at", "archived_at")
_LARGE = (
    "UPDATE millpond_archive SET payload = (SELECT string_agg(uuid_send(gen_random_uuid()), ''::bytea) FROM {many})"
)


@pytest.mark.parametrize("kept_outside", [False, True])
def test_an_archive_of_many_pages(postgres_url: str, kept_outside: bool) -> None:
    """In blocks, and row by row where the server stores large values outside the table."""
    fill(postgres_url, [])
    with psycopg.connect(postgres_url, autocommit=True, row_factory=dict_row) as connection:
        connection.execute(_MANY)
        if kept_outside:
            connection.execute(_LARGE.format(many="generate_series(1, 500)") + " WHERE due_at = 1")
        wanted = connection.execute(
            "SELECT id::text, queue, key, priority, payload, headers, deliveries, attempts, state, reason, error, "
            f"{', '.join(_MOMENTS)} FROM millpond_archive ORDER BY id"
        ).fetchall()
        sizes = connection.execute("SELECT pg_relation_size(inhrelid) / 8192 AS pages FROM pg_inherits").fetchall()
    assert max(row["pages"] for row in sizes) > 2 * BLOCK_PAGES
    with open_reader(postgres_url) as reader:
        pieces = [piece for part in reader.slices(Read("archive", at_least=2)) for piece in part]
        assert {piece.blocks is None for piece in pieces} == {kept_outside}
        found = read_by(reader, "archive", at_least=2).sort_by("id").to_pylist()
    for row, want in zip(found, wanted, strict=True):
        moments = {name: moment(want[name]) for name in _MOMENTS}
        assert {name: row[name] for name in want} == want | moments


def test_many_rows_come_in_bounded_batches(postgres_url: str, mariadb_url: str, sqlite_url: str) -> None:
    for url in (postgres_url, mariadb_url, sqlite_url):
        fill(url, ["large"], each=30)
        columns = batch_columns("messages")
        some = "(SELECT 1 AS n" + " UNION ALL SELECT 1" * 49 + ")"
        text = f"FROM {{message}}, {some} AS a, {some} AS b"
        with open_reader(url) as reader:
            batches = list(reader.batches(select(columns, text), {}, columns))
        assert sum(batch.num_rows for batch in batches) == 2_500 * len(rows(url, "messages"))
        assert max(batch.nbytes for batch in batches) < 64 << 20


def test_text_values_are_never_part_of_a_statement(postgres_url: str) -> None:
    fill(postgres_url, HOSTILE)
    with open_reader(postgres_url) as reader:
        for queue in (*HOSTILE, "'", "\\'; SELECT 1", "$1", ":x", "{now}"):
            found = reader.rows("SELECT count(*) FROM {message} WHERE queue = :queue", {"queue": queue})
            assert (found[0][0] > 0) == (queue in HOSTILE)
        with pytest.raises(TypeError):
            reader.rows("SELECT :x", {"x": object()})


def test_through_a_pooler(postgres_server: Postgres, postgres_url: str) -> None:
    fill(postgres_url)
    expected = sorted(str(id_) for id_, row in rows(postgres_url, "archive").items() if row.queue == HOSTILE[1])
    with PgBouncer(postgres_server) as pooler:
        url = pooler.url_of(postgres_url.rpartition("/")[2])
        found = read_table(url, "archive", conditions=[Condition("queue", Operator.EQUAL, HOSTILE[1])])
    assert sorted(found["id"].to_pylist()) == expected != []


def test_errors_say_what_to_do_and_no_password(postgres_server: Postgres, postgres_url: str, mariadb_url: str) -> None:
    wrong = postgres_url.replace(password(postgres_url), "wr%40ng")
    for url, error in (
        (wrong, AuthenticationFailed),
        (postgres_server.url_of("nowhere"), UnknownDatabase),
        (mariadb_url.rpartition("/")[0] + "/nowhere", UnknownDatabase),
        ("postgresql://u:s3cret@127.0.0.1:1/x", Unreachable),
        ("mysql://u:s3cret@127.0.0.1:1/x", Unreachable),
        ("sqlite:///no/such/file.db", NotMigrated),
        ("redis://u:s3cret@h", UnknownScheme),
    ):
        with pytest.raises(error) as raised:
            open_reader(url)
        assert not any(secret in str(raised.value) for secret in ("s3cret", "wr@ng", password(url)))
    for url in (postgres_url, mariadb_url):
        with open_reader(url) as reader, pytest.raises(NotMigrated, match="millpond migrate"):
            reader.check()


def test_a_connection_that_is_cut_in_the_middle(postgres_url: str, postgres_server: Postgres) -> None:
    fill(postgres_url, ["orders"], each=30)
    columns = batch_columns("messages")
    with open_reader(postgres_url) as reader:
        text = select(columns, "FROM {message}, generate_series(1, 200000)")
        found = reader.batches(text, {}, columns)
        next(found)
        with postgres_server.connect() as admin:
            admin.execute(
                "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = %s",
                (postgres_url.rpartition("/")[2],),
            )
        with pytest.raises(StoreError) as raised:
            for _ in found:
                pass
        assert password(postgres_url) not in str(raised.value)
