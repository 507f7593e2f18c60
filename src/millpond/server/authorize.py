"""The caller's rights: by a token, by the application's login, or all of them on loopback without tokens."""

from __future__ import annotations

from collections.abc import Iterable

from starlette.requests import Request

from millpond.server.grants import ANYONE, Grant
from millpond.server.handlers.call import Refuse
from millpond.server.settings import is_loopback
from millpond.server.state import ServerState

_SAME = ("same-origin", "none")
_OF_PROXIES = frozenset(
    {"forwarded", "via", "x-forwarded-for", "x-forwarded-host", "x-forwarded-proto", "x-forwarded-server", "x-real-ip"}
)


async def caller(state: ServerState, request: Request, cookie: str | None = None) -> Grant | None:
    """The rights of the caller; None: it has none. `cookie`: a token, if the request has no header."""
    if state.settings.resolver is not None:
        return await state.settings.resolver(request)
    if state.settings.open_to_all:
        return ANYONE
    token = bearer(request.headers.get("authorization", ""))
    # While there are no tokens, a cookie is of another server of this machine.
    if token is None and _is_local_host(request) and await is_open(state, request.headers.keys()):
        return ANYONE
    token = token or cookie
    return None if token is None else await by_token(state, token, address(request))


async def by_token(state: ServerState, token: str, address: str) -> Grant | None:
    """The rights that a token gives. Wrong ones are slowed down by address; a right one is never refused for them."""
    grant = await state.tokens.grant(token)
    if grant is None:
        state.failed_logins.take(address)
    return grant


async def is_open(state: ServerState, headers: Iterable[str]) -> bool:
    """Whether callers need no token: on loopback, without a proxy, while no token was ever made."""
    by_proxy = not _OF_PROXIES.isdisjoint(name.lower() for name in headers)
    return state.settings.is_local and not by_proxy and await state.tokens.never_made()


def bearer(header: str) -> str | None:
    scheme, _, value = header.partition(" ")
    return value.strip() if scheme.lower() == "bearer" and value.strip() else None


def refuse_foreign_pages(request: Request) -> None:
    """Refuse changes that a page of another site sends by a reader's browser.

    A browser sends JSON to another site only after asking, and the server never agrees. It also names the site.
    """
    if request.method in ("GET", "HEAD", "OPTIONS"):
        return
    if request.headers.get("sec-fetch-site", "none") not in _SAME:
        raise Refuse(403, "Forbidden", "requests from pages of other sites are refused")
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise Refuse(415, "WrongType", "send the header content-type: application/json")


def _is_local_host(request: Request) -> bool:
    """Whether the client named this machine. A page that moved its own name to 127.0.0.1 names itself."""
    host = request.headers.get("host", "").rsplit("@", 1)[-1]
    name = host[: host.index("]") + 1] if host.startswith("[") and "]" in host else host.partition(":")[0]
    return is_loopback(name)


def address(request: Request) -> str:
    return request.client.host if request.client is not None else "unknown"
