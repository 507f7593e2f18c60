"""Errors as replies: their status, kind and text."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from uuid import UUID

import msgspec
from starlette.requests import ClientDisconnect
from starlette.responses import Response

from millpond import errors
from millpond.server.handlers.call import Refuse
from millpond.server.limits import TooMany
from millpond.server.types import Problem

log = logging.getLogger("millpond.server")

# The first class that fits counts.
_STATUS: tuple[tuple[type[Exception], int], ...] = (
    (errors.BodyTooLarge, 413),
    (errors.UnknownQueue, 404),
    (errors.UnknownStream, 404),
    (errors.Unsupported, 501),
    (errors.StreamError, 409),
    (errors.LeaseLost, 409),
    (errors.StoreBusy, 503),
    (errors.StoreUnavailable, 503),
    (errors.Closed, 503),
    (errors.DataRefused, 400),
    (errors.StoreError, 503),
    (errors.MillpondError, 400),
)


class ErrorReply(msgspec.Struct, frozen=True):
    """An error as a client sees it."""

    status: int
    kind: str
    text: str
    headers: Mapping[str, str] = {}
    id: UUID | None = None


def error_reply(error: Exception) -> ErrorReply:
    """The error for a client. The text of an unexpected one stays in the log."""
    match error:
        case Refuse():
            headers = {"www-authenticate": "Bearer"} if error.status == 401 else {}
            return ErrorReply(error.status, error.kind, str(error), headers)
        case TooMany():
            return ErrorReply(error.status, "TooMany", str(error), {"retry-after": str(max(1, round(error.after)))})
        case msgspec.MsgspecError() | UnicodeError() | RecursionError():
            return ErrorReply(400, "InvalidRequest", f"the request does not match its type: {error}")
        case ClientDisconnect():
            return ErrorReply(400, "Disconnected", "the client left before its request was complete")
        case errors.NotUnique():
            return ErrorReply(409, "NotUnique", str(error), id=error.id)
        case errors.MillpondError():
            status = next(status for kind, status in _STATUS if isinstance(error, kind))
            headers = {"retry-after": "1"} if status == 503 else {}
            return ErrorReply(status, type(error).__name__, public_text(error), headers)
        case OverflowError():
            return ErrorReply(400, "InvalidRequest", f"the request has a number out of range: {error}")
    log.error("unexpected error: %s", type(error).__name__, exc_info=error)
    return ErrorReply(500, "ServerError", "an unexpected error; its text is in the server's log")


def public_text(error: Exception) -> str:
    """The text of an error for clients. That of a database may name its address, so it stays in the log."""
    if isinstance(error, errors.StoreError) and not isinstance(error, errors.UnknownQueue):
        log.warning("the database fails: %s", error, extra={"error": type(error).__name__})
        if isinstance(error, errors.DataRefused) and error.receipts:
            ids = ", ".join(str(receipt.id) for receipt in error.receipts[:3])
            more = f" and {len(error.receipts) - 3} more" if len(error.receipts) > 3 else ""
            return f"the database refused to settle {ids}{more}; the others were settled. The server's log has its text"
        if isinstance(error, errors.DataRefused):
            return "the database refused a value of this request; the server's log has its text"
        return "the database cannot do this now; try again later. The server's log has its text"
    return str(error)


def problem(found: ErrorReply) -> Response:
    """The error as JSON."""
    body = msgspec.json.encode(Problem(error=found.kind, message=found.text, id=found.id))
    return Response(body, found.status, media_type="application/json", headers=dict(found.headers))
