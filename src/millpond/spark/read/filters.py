"""Spark's filters that the database can evaluate: those that select exactly the same rows there."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import Any
from uuid import UUID

from pyspark.sql import datasource

from millpond.clock import time_us
from millpond.message import State
from millpond.seam.arrow import Column, Condition, Kind, Operator

_OPERATORS: Mapping[type[datasource.Filter], Operator] = {
    datasource.EqualTo: Operator.EQUAL,
    datasource.LessThan: Operator.BELOW,
    datasource.LessThanOrEqual: Operator.AT_MOST,
    datasource.GreaterThan: Operator.ABOVE,
    datasource.GreaterThanOrEqual: Operator.AT_LEAST,
    datasource.In: Operator.AMONG,
    datasource.IsNull: Operator.IS_NULL,
    datasource.IsNotNull: Operator.IS_NOT_NULL,
}
_SAME = (Operator.EQUAL, Operator.AMONG)
_LONGEST_LIST = 1000


class _NotTheSame(Exception):
    """The database would select other rows, or raise an error."""


def condition(filter_: datasource.Filter, columns: Mapping[str, Column]) -> Condition | None:
    """The filter as a condition of the database, or None if Spark must evaluate it."""
    operator = _OPERATORS.get(type(filter_))
    path: tuple[str, ...] = getattr(filter_, "attribute", ())
    if operator is None or len(path) != 1 or path[0] not in columns or path[0] == "shard":
        return None
    column = columns[path[0]]
    if operator in (Operator.IS_NULL, Operator.IS_NOT_NULL):
        return Condition(column.name, operator)
    value = filter_.value  # type: ignore[attr-defined]
    try:
        if operator is not Operator.AMONG:
            return Condition(column.name, operator, _value(column, operator, value))
        if not 0 < len(value) <= _LONGEST_LIST:
            return None
        return Condition(column.name, operator, [_value(column, operator, one) for one in value])
    except _NotTheSame:
        return None


def exact(found: Condition, columns: Mapping[str, Column]) -> bool:
    """True if Spark need not check the database's result again. Text it must, because MySQL ignores trailing blanks."""
    return columns[found.column].kind is not Kind.TEXT


def _value(column: Column, operator: Operator, value: Any) -> Any:
    if column.kind is Kind.ID:
        return _id(value)
    match column.kind, value:
        case Kind.TIME, datetime() if value.tzinfo is not None:
            return time_us(value, column.name)
        case Kind.NUMBER, int() if not isinstance(value, bool):
            return value
        # The order of text differs between databases.
        case Kind.STATE, str() if operator in _SAME and value in set(State):
            return value
        case Kind.TEXT, str() if operator in _SAME and _is_plain(value):
            return value
    raise _NotTheSame


def _id(value: Any) -> UUID:
    """Ids are text to Spark. In our form of the text they have the same order as in the database."""
    try:
        id_ = UUID(value)
    except (ValueError, TypeError, AttributeError):
        raise _NotTheSame from None
    if str(id_) != value:
        raise _NotTheSame
    return id_


def _is_plain(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return "\0" not in text  # PostgreSQL does not accept NUL
