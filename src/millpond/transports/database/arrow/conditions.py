"""Conditions on columns as SQL, and the statements that read the rows they select."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any
from uuid import UUID

from millpond.seam.arrow import Condition, Operator, Piece
from millpond.transports.database.sql.dialect import Dialect


def where(d: Dialect, conditions: Sequence[Condition]) -> tuple[str, Mapping[str, Any]]:
    """The conditions joined by AND, and their values."""
    parts, params = [], dict[str, Any]()
    for n, condition in enumerate(conditions):
        column = "{key}" if condition.column == "key" else condition.column
        name = f"filter_{n}"
        match condition.operator:
            case Operator.IS_NULL | Operator.IS_NOT_NULL:
                parts.append(f"{column} {condition.operator.value}")
                continue
            case Operator.AMONG:
                parts.append(f"{column} IN (:*{name})")
                params[name] = [_bound(d, value) for value in condition.value]
            case operator:
                parts.append(f"{column} {operator.value} :{name}")
                params[name] = _bound(d, condition.value)
    return " AND ".join(parts) or "1 = 1", params


def between(column: str, low: Any, high: Any) -> list[Condition]:
    """The values from `low` on and below `high`; None is no bound."""
    bounds = [Condition(column, Operator.AT_LEAST, low), Condition(column, Operator.BELOW, high)]
    return [bound for bound in bounds if bound.value is not None]


def piece(d: Dialect, source: str, conditions: Sequence[Condition], *, by_index: bool = False) -> Piece:
    text, params = where(d, conditions)
    return Piece(f"FROM {source} WHERE {text}", params, by_index=by_index)


def _bound(d: Dialect, value: Any) -> Any:
    return d.id_in(value) if isinstance(value, UUID) else value
