"""Statements: named parameters become the style of each driver."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

import pytest

from millpond.transports.database.mysql.dialect import MysqlDialect
from millpond.transports.database.sql.dialect import CACHED_STATEMENTS
from millpond.transports.database.sql.statement import LONGEST_LIST, Query, Statement, Style, drive, drive_async

TEXT = "SELECT :b::bigint, :a FROM t WHERE x = :b AND note = 'a:b' AND y::text IS NULL"


@pytest.mark.parametrize(
    ("style", "sql", "values"),
    [
        (
            Style.DOLLAR,
            "SELECT $1::bigint, $2 FROM t WHERE x = $1 AND note = 'a:b' AND y::text IS NULL",
            [2, 1],
        ),
        (Style.QMARK, "SELECT ?::bigint, ? FROM t WHERE x = ? AND note = 'a:b' AND y::text IS NULL", [2, 1, 2]),
        (Style.FORMAT, "SELECT %s::bigint, %s FROM t WHERE x = %s AND note = 'a:b' AND y::text IS NULL", [2, 1, 2]),
    ],
)
def test_each_style(style: Style, sql: str, values: list[int]) -> None:
    assert Statement(TEXT).render(style, {"a": 1, "b": 2, "unused": 3}) == (sql, values)


@pytest.mark.parametrize(("count", "marks"), [(1, "?"), (2, "?, ?"), (3, "?, ?, ?, ?"), (5, "?, ?, ?, ?, ?, ?, ?, ?")])
def test_lists_are_filled_up_so_that_few_texts_are_prepared(count: int, marks: str) -> None:
    statement = Statement("SELECT :x WHERE id IN (:*ids) AND y = :y")
    sql, values = statement.render(Style.QMARK, {"ids": list(range(count)), "x": "x", "y": "y"})
    assert sql == f"SELECT ? WHERE id IN ({marks}) AND y = ?"
    assert values[0] == "x" and values[-1] == "y"
    assert set(values[1:-1]) == set(range(count)) and len(values) == marks.count("?") + 2


def test_a_text_is_rendered_once_for_each_length() -> None:
    statement = Statement("IN (:*ids)")
    first, _ = statement.render(Style.FORMAT, {"ids": [1, 2, 3]})
    again, values = statement.render(Style.FORMAT, {"ids": [4, 5, 6, 7]})
    assert first is again and values == [4, 5, 6, 7]


def test_an_array_stays_one_value_where_the_database_takes_it() -> None:
    assert Statement("= ANY(:ids::uuid[])").render(Style.DOLLAR, {"ids": [1, 2]}) == ("= ANY($1::uuid[])", [[1, 2]])


def test_a_percent_sign_marks_no_parameter() -> None:
    statement = Statement("SELECT a % 2, :b")
    assert statement.render(Style.FORMAT, {"b": 1}) == ("SELECT a %% 2, %s", [1])
    assert statement.render(Style.QMARK, {"b": 1}) == ("SELECT a % 2, ?", [1])


def test_values_never_reach_the_text() -> None:
    evil = "'; DROP TABLE millpond_message; --"
    for style in Style:
        sql, values = Statement("SELECT :x").render(style, {"x": evil})
        assert evil not in sql and values == [evil]


def test_a_missing_parameter_is_an_error() -> None:
    with pytest.raises(KeyError):
        Statement("SELECT :x").render(Style.QMARK, {})


@pytest.mark.parametrize(
    ("style", "text", "rows"),
    [
        (Style.QMARK, "(?, ?, ?)", [(2, 1, 2), (4, 3, 4)]),
        (Style.DOLLAR, "($1, $2, $1)", [(2, 1), (4, 3)]),
    ],
)
def test_many_rows_in_the_order_of_the_text(style: Style, text: str, rows: list[Any]) -> None:
    got = Statement("(:b, :a, :b)").render_many(style, ["a", "b"], [(1, 2), (3, 4)])
    assert got == (text, rows)
    assert Statement("(:a)").render_many(style, ["b", "a"], [(1, 2)])[1] == [(2,)]


def test_a_list_too_long_for_one_statement_is_asked_in_parts() -> None:
    many = list(range(2 * LONGEST_LIST + 5))
    query = Query(Statement("SELECT id WHERE id IN (:*ids) AND x = :x"), {"ids": many, "x": 1})
    assert [len(part.params["ids"]) for part in query.parts() or []] == [LONGEST_LIST, LONGEST_LIST, 5]

    def one() -> Generator[Any, Any, Any]:
        return (yield query)

    assert drive(one(), lambda step: [(id_,) for id_ in step.params["ids"]]) == [(id_,) for id_ in many]  # type: ignore[union-attr]
    short = Query(Statement("IN (:*ids)"), {"ids": [1]})
    assert short.parts() is None


# --- steps ------------------------------------------------------------------------------------------------

ONE, TWO = Query(Statement("one"), {}), Query(Statement("two"), {})


def steps() -> Generator[Any, Any, list[Any]]:
    rows = yield ONE
    try:
        more = yield TWO
    except ValueError:
        more = "recovered"
    return [rows, more]


def run(step: Any) -> str:
    if step is TWO:
        raise ValueError
    return "rows"


async def test_steps_run_on_any_connection_and_may_catch_its_errors() -> None:
    assert drive(steps(), run) == ["rows", "recovered"]  # type: ignore[arg-type]

    async def run_async(step: Any) -> str:
        return run(step)

    assert await drive_async(steps(), run_async) == ["rows", "recovered"]


async def test_an_error_that_steps_do_not_catch_passes() -> None:
    def fails(step: Any) -> Any:
        raise KeyError("driver")

    with pytest.raises(KeyError, match="driver"):
        drive(steps(), fails)


def test_the_cache_of_statements_is_bounded() -> None:
    """A probe of MySQL has a text for each pattern of priorities, and publishers choose those."""
    dialect = MysqlDialect()
    for n in range(CACHED_STATEMENTS + 100):
        gaps = [(low, low + (n >> low & 1)) for low in range(11)]
        dialect.probe({}, gaps, [None] * len(gaps))
        assert len(dialect._statements) <= CACHED_STATEMENTS
    assert dialect.sql("SELECT 1") is dialect.sql("SELECT 1")
