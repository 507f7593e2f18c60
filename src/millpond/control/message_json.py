"""A message as JSON values."""

from __future__ import annotations

from typing import Any

import msgspec

from millpond import codec
from millpond.clock import as_datetime, utc_text
from millpond.errors import BodyNotDecodable
from millpond.seam.operations import Row


def facts(row: Row) -> dict[str, Any]:
    """A message as JSON values, without unknown ones."""
    values: dict[str, Any] = {}
    for field, value in msgspec.structs.asdict(row).items():
        if value is not None and field not in ("headers", "payload", "history") and (value or field != "retried"):
            name = f"{field[:-3]}_at" if field.endswith("_us") else field
            values[name] = utc_text(as_datetime(value)) if name != field else msgspec.to_builtins(value)
    if row.headers:
        values["headers"] = dict(row.headers)
    if row.history is not None:
        values["failed_attempts"] = [
            {
                "claimed_at": utc_text(attempt.claimed_at),
                "ended_at": utc_text(attempt.ended_at),
                **{name: getattr(attempt, name) for name in ("took", "error", "traceback") if getattr(attempt, name)},
            }
            for attempt in row.failed_attempts
        ]
    return {**values, "body": body(row)}


def body(row: Row) -> Any:
    """The body as JSON values: bytes that are neither JSON nor text as {"base64": …}."""
    content_type = row.headers.get(codec.CONTENT_TYPE)
    try:
        value = codec.decode(row.payload, content_type)
    except BodyNotDecodable:
        value = row.payload
    return msgspec.to_builtins({"base64": value}) if isinstance(value, bytes) else value
