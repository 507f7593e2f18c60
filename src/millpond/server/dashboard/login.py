"""Log in with a token: the browser keeps it in a cookie that no script reads and that no other site sends."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import RedirectResponse, Response

from millpond.server import authorize
from millpond.server.dashboard.rendering import HOME, Links
from millpond.server.handlers.call import Call, Refuse

TOKEN = "token"
_KEPT = 12 * 3600
"""Seconds until a reader logs in again."""


async def log_in(call: Call) -> Response:
    """Keep the given token in a cookie."""
    token = call.body.get("token", [""])[0].strip()
    grant = None
    if token and call.state.settings.resolver is None:
        grant = await authorize.by_token(call.state, token, authorize.address(call.request))
    if grant is None:
        raise Refuse(401, "WrongToken", "this token is unknown or has expired; make one with: millpond tokens add")
    links = Links(call.request)
    response = RedirectResponse(links.root + inner_path(call.body.get("next", [""])[0]), 303)
    keep(response, call.request, TOKEN, token, _KEPT)
    return response


async def log_out(call: Call) -> Response:
    """Forget the token."""
    links = Links(call.request)
    response = RedirectResponse(links(), 303)
    response.delete_cookie(cookie_name(call.request, TOKEN), path=links(), httponly=True, samesite="strict")
    return response


def inner_path(text: str) -> str:
    """A path of the dashboard; every other one becomes its first page."""
    inside = text == HOME or text.startswith((f"{HOME}/", f"{HOME}?"))
    return text if inside and text.isprintable() and "\\" not in text and text.isascii() else HOME


def cookie_name(request: Request, what: str) -> str:
    """Name of a cookie. It has the port, because all servers of one host get each other's cookies."""
    port = request.url.port
    return f"millpond_{what}" if port is None else f"millpond_{what}_{port}"


def keep(response: Response, request: Request, what: str, value: str, seconds: int | None = None) -> None:
    """Set a cookie for the dashboard only."""
    response.set_cookie(
        cookie_name(request, what),
        value,
        max_age=seconds,
        path=Links(request)(),
        secure=request.url.scheme == "https",
        httponly=True,
        samesite="strict",
    )
