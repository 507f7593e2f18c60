"""Fields of the forms of operators, and the question before an act."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any
from uuid import UUID

import msgspec

from millpond.clock import as_datetime
from millpond.errors import InvalidOption
from millpond.message import check_name
from millpond.seam.transport import Capability
from millpond.server.call_handler import perform
from millpond.server.dashboard.rendering import now
from millpond.server.handlers.call import Call
from millpond.server.routes import ROUTES

_BY_NAME = {route.name: route for route in ROUTES}


class Confirm(msgspec.Struct, frozen=True, kw_only=True):
    """A question before an act."""

    title: str
    text: str
    button: str
    fields: list[tuple[str, str]]
    destructive: bool = False
    has_rate: bool = False


def field(call: Call, name: str) -> str:
    return str(call.body.get(name, [""])[0])


def queue_of(call: Call) -> str:
    name = check_name(field(call, "queue"), "queue")
    call.need(name)
    return name


def ids_of(call: Call) -> list[UUID]:
    try:
        ids = [UUID(text) for text in call.body.get("id", [])]
    except ValueError:
        raise InvalidOption("an id of these messages cannot be read; load the page again") from None
    if not ids:
        raise InvalidOption("no message is selected; go back and select some")
    return ids


def moment_of(call: Call, name: str) -> datetime | None:
    """A time as browsers send it, in UTC, or with its zone; None if the field is empty."""
    text = field(call, name).strip()
    if not text:
        return None
    try:
        at = datetime.fromisoformat(text)
        return at if at.tzinfo is not None else at.replace(tzinfo=UTC)
    except ValueError:
        raise InvalidOption(f"a time is written as 2030-01-31T08:00, not {text[:40]!r}") from None


async def database_now(call: Call, queue: str) -> datetime:
    """The time by the clock of archived messages. By another one, other messages would change than were counted."""
    if Capability.ARCHIVE not in call.transport.capabilities:
        return now()
    (rates,) = await call.control.operations.rates([queue], over=1)
    return as_datetime(rates.at_us)


async def run_route(call: Call, name: str, body: Any = None, **path: str) -> Any:
    """Call a handler of the HTTP interface."""
    return await perform(msgspec.structs.replace(call, body=body, path=path), _BY_NAME[name])
