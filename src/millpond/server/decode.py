"""Queries and bodies of requests, by their types and within their limits."""

from __future__ import annotations

import asyncio
import typing
from collections.abc import Collection
from datetime import datetime
from typing import Any

import msgspec
from starlette.requests import Request

from millpond import errors
from millpond.server.handlers.call import Refuse

_MINUTES = len("2026-01-01T00:00")
"""Length of a time as browsers send it."""


def query(request: Request, kind: type, *, skip_empty: bool = False, ignore: Collection[str] = ()) -> Any:
    """The query by its type. A name that is given twice is an error unless it is a list.

    `skip_empty`: fields of a form that were left empty are left out, and times to the minute are of UTC. `ignore`:
    names of other parameters.
    """
    values: dict[str, Any] = {}
    hints = typing.get_type_hints(kind)
    for name in set(request.query_params) - set(ignore):
        given = [value for value in request.query_params.getlist(name) if value or not skip_empty]
        if typing.get_origin(hints.get(name)) is list:
            values[name] = [value.upper() for value in given]
        elif len(given) == 1:
            is_moment = skip_empty and datetime in typing.get_args(hints.get(name))
            values[name] = f"{given[0]}:00Z" if is_moment and len(given[0]) == _MINUTES else given[0]
        elif given:
            raise errors.InvalidOption(f"the parameter {name[:40]!r} is given {len(given)} times")
    return msgspec.convert(values, kind, strict=False)


async def body(request: Request, most: int, *, within: float = 60.0) -> bytes:
    """The bytes of the body, at most `most`, that came within so many seconds."""
    length = request.headers.get("content-length", "0")
    if length.isascii() and length.isdigit() and int(length[:20]) > most:
        raise Refuse(413, "TooLarge", f"the request has {int(length[:20]):,} bytes, the limit is {most:,}")
    parts, size = [], 0
    try:
        async with asyncio.timeout(within):
            async for part in request.stream():
                size += len(part)
                if size > most:
                    raise Refuse(413, "TooLarge", f"the request has more than {most:,} bytes, which is the limit")
                parts.append(part)
    except TimeoutError:
        raise Refuse(408, "TooSlow", f"the body of the request did not come within {within:g} s") from None
    return b"".join(parts)
