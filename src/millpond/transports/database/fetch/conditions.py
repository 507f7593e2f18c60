"""Conditions on columns as SQL: what a reader may ask the database to filter by."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any
from uuid import UUID

from millpond.transports.database.dialect import Dialect


class Operator(Enum):
    EQUAL = "="
    BELOW = "<"
    AT_MOST = "<="
    ABOVE = ">"
    AT_LEAST = ">="
    AMONG = "IN"
    IS_NULL = "IS NULL"
    IS_NOT_NULL = "IS NOT NULL"


@dataclass(frozen=True)
class Condition:
    """One comparison. `column` is a name of ours; the value is text, a whole number or a UUID, or a list of them."""

    column: str
    operator: Operator
    value: Any = None


def where(d: Dialect, conditions: Sequence[Condition]) -> tuple[str, Mapping[str, Any]]:
    """The conditions as one, with their values."""
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


def _bound(d: Dialect, value: Any) -> Any:
    return d.id_in(value) if isinstance(value, UUID) else value
