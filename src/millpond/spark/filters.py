"""Which of Spark's filters the database answers: those whose meaning is the same there, to the last row."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import Any
from uuid import UUID

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
)

from millpond.clock import moment
from millpond.message import State
from millpond.transports.database.fetch.columns import Column, Kind
from millpond.transports.database.fetch.conditions import Condition, Operator

_OPERATORS: Mapping[type[Filter], Operator] = {
    EqualTo: Operator.EQUAL,
    LessThan: Operator.BELOW,
    LessThanOrEqual: Operator.AT_MOST,
    GreaterThan: Operator.ABOVE,
    GreaterThanOrEqual: Operator.AT_LEAST,
    In: Operator.AMONG,
    IsNull: Operator.IS_NULL,
    IsNotNull: Operator.IS_NOT_NULL,
}
_SAME = (Operator.EQUAL, Operator.AMONG)
_LONGEST_LIST = 1000


class _NotTheSame(Exception):
    """The database would answer something else, or nothing."""


def condition(filter_: Filter, columns: Mapping[str, Column]) -> Condition | None:
    """The filter in the database's terms, or None if it is Spark's alone."""
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
    """Whether Spark need not look again. It does at text, since MySQL takes no notice of blanks at its end."""
    return columns[found.column].kind is not Kind.TEXT


def _value(column: Column, operator: Operator, value: Any) -> Any:
    if column.kind is Kind.ID:
        return _id(value)
    match column.kind, value:
        case Kind.MOMENT, datetime() if value.tzinfo is not None:
            return moment(value, column.name)
        case Kind.NUMBER, int() if not isinstance(value, bool):
            return value
        # Of larger and smaller text databases think differently.
        case Kind.STATE, str() if operator in _SAME and value in set(State):
            return value
        case Kind.TEXT, str() if operator in _SAME and _is_plain(value):
            return value
    raise _NotTheSame


def _id(value: Any) -> UUID:
    """Ids are text to Spark. In the form that we show them they have the same order as in the database."""
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
    return "\0" not in text  # which PostgreSQL does not take
