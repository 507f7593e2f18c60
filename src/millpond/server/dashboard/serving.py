"""Checks and frame of every page: login, role, forms of this site only, and errors written for people."""

from __future__ import annotations

import hmac
import secrets
from typing import Any
from urllib.parse import parse_qs, quote, urlsplit

from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.routing import Route as StarletteRoute

from millpond.clock import monotonic
from millpond.seam.transport import Capability
from millpond.server import authorize, decode
from millpond.server.dashboard.live_counts import LiveCounts
from millpond.server.dashboard.login import TOKEN, cookie_name, inner_path, keep
from millpond.server.dashboard.notices import notice
from millpond.server.dashboard.rendering import HEADERS, HOME, Links, View, now, render
from millpond.server.dashboard.table import PAGES
from millpond.server.grants import ANYONE, Grant, Role
from millpond.server.handlers.call import Call, Refuse, forbidden, not_found
from millpond.server.problems import ErrorReply, error_reply
from millpond.server.routes import Route
from millpond.server.state import ServerState

_FORM = "form"
_FORM_LIMIT = 1024 * 1024
_LOGIN_LIMIT, _LOGIN_WITHIN = 16 * 1024, 10.0
_MOST_FIELDS = 5000
_TITLES = {
    400: "This cannot be done",
    401: "Log in",
    403: "You have no right to this",
    404: "Not found",
    409: "This is not possible now",
    413: "The request is too large",
    429: "Too many requests",
    501: "This transport cannot do that",
    503: "The database does not answer",
}


def routes(state: ServerState) -> list[StarletteRoute]:
    """The routes of all pages, and of addresses that are none."""
    live_counts = LiveCounts(state)
    return [
        StarletteRoute(r.path, _Endpoint(state, live_counts, r), methods=[r.method], name=f"page_{r.name}")
        for r in (*PAGES, _NO_PAGE)
    ]


async def _no_page(call: Call) -> Response:
    """An address that is no page; with a slash at its end it may be one."""
    path = call.path["rest"]
    if path in _ONLY_FORMS:  # a page that was opened again
        return RedirectResponse(Links(call.request)(), 303)
    if not path or path.endswith("/"):
        return RedirectResponse(Links(call.request)(f"/{quote(path)}".rstrip("/")), 307)
    raise not_found(f"there is no page {path[:80]!r}; choose one of those above")


_ONLY_FORMS = frozenset(route.path.removeprefix(f"{HOME}/") for route in PAGES if route.method == "POST")
_NO_PAGE = Route("GET", f"{HOME}/{{rest:path}}", Role.READ, _no_page, Response)


class _Endpoint:
    """One page. An instance, not a function: Starlette then passes the ASGI call itself."""

    def __init__(self, state: ServerState, live_counts: LiveCounts, route: Route) -> None:
        self._state = state
        self._live_counts = live_counts
        self._route = route

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        request = Request(scope, receive, send)
        request.state.live_counts = self._live_counts
        started = monotonic()
        form = request.cookies.get(cookie_name(request, _FORM)) or secrets.token_urlsafe(24)
        grant: Grant | None = None
        try:
            with self._state.connections.one():
                grant = await self._caller(request)
                name = f"address {authorize.address(request)}" if grant is None else grant.name
                with self._state.connections.share(name):
                    made = await self._route.handler(await self._checked(request, grant))
                response = made if isinstance(made, Response) else self._page(request, form, made, grant)
        except Exception as e:
            response = self._error(request, form, error_reply(e), grant)
        self._state.metrics.add(self._route.path, response.status_code, monotonic() - started)
        for name, value in HEADERS.items():
            response.headers.setdefault(name, value)
        if request.cookies.get(cookie_name(request, _FORM)) != form:
            keep(response, request, _FORM, form)
        await response(scope, receive, send)

    async def _caller(self, request: Request) -> Grant | None:
        """The rights of the caller; None: this page needs none."""
        state, route = self._state, self._route
        if route.role is None:
            return None
        grant = await authorize.caller(state, request, request.cookies.get(cookie_name(request, TOKEN)))
        if grant is None:
            raise Refuse(401, "Unauthorized", "log in with a token that has the role read or operate")
        state.rates.take(grant.name)
        return grant

    async def _checked(self, request: Request, grant: Grant | None) -> Call:
        """The call, after every check that needs no handler."""
        state, route = self._state, self._route
        if grant is not None and route.role is not None and not grant.has(route.role):
            own = ", ".join(sorted(grant.roles)) or "none"
            raise forbidden(f"this needs the role {route.role}; {grant.name} has: {own}")
        fields: dict[str, list[str]] = {}
        if request.method == "POST":
            _refuse_other_sites(request)
            fields = await _fields(request, is_known=grant is not None)
            request.state.back = inner_path(fields.get("next", fields.get("back", [""]))[0])
            given, kept = fields.pop("form", [""])[0], request.cookies.get(cookie_name(request, _FORM), "")
            if not hmac.compare_digest(given.encode(), kept.encode()) or not given:
                raise forbidden("this form is too old, or comes from elsewhere; go back, load the page again and retry")
        return Call(
            state=state,
            request=request,
            grant=grant or ANYONE,
            role=route.role,
            path=request.path_params,
            query=None
            if route.query is None
            else decode.query(request, route.query, skip_empty=True, ignore=("done",)),
            body=fields,
        )

    def _page(self, request: Request, form: str, view: View, grant: Grant | None) -> Response:
        links = Links(request)
        path = request.scope["path"].removeprefix(links.root)
        here = path + (f"?{request.url.query}" if request.url.query else "")
        if request.method == "POST":  # the page of the form
            here = getattr(request.state, "back", HOME)
        has = self._state.transport.capabilities
        common = {
            "url": links,
            "form": form,
            "grant": grant,
            "operates": grant is not None and grant.has(Role.OPERATE),
            "path": path,
            "here": here,
            "notice": notice(request.query_params.get("done", "")),
            "nav": _nav(links, path, has, grant),
            "logged_in": cookie_name(request, TOKEN) in request.cookies,
            "own_login": self._state.settings.resolver is None,
            "now": now(),
            "is_live": self._route.method == "GET" and view.status == 200 and view.is_live,
        }
        return render(view, common)

    def _error(self, request: Request, form: str, found: ErrorReply, grant: Grant | None) -> Response:
        values = {
            "title": _TITLES.get(found.status, "An error in the server"),
            "text": found.text,
            "status": found.status,
            "wrong": found.kind == "WrongToken",
            "is_form": request.method == "POST",
        }
        template = "login.html" if found.status == 401 else "error.html"
        response = self._page(request, form, View(template, values, found.status), grant)
        response.headers.update({k: v for k, v in found.headers.items() if k != "www-authenticate"})
        return response


def _nav(links: Links, path: str, has: Capability, grant: Grant | None) -> list[tuple[str, str, bool]]:
    """(name, link, whether it is this page) of each page that the caller can use."""
    if grant is None or not grant.has(Role.READ):
        return []
    entries = [("Overview", "", True), ("Failures", "/failures", Capability.ARCHIVE in has)]
    entries += [("Messages", "/messages", Capability.BROWSE in has)]
    entries += [("Workers", "/workers", Capability.PRESENCE in has)]
    entries += [("Periodic", "/periodic", Capability.PERIODIC in has)]
    entries += [("Streams", "/streams", Capability.STREAM_STATUS in has and grant.all_queues)]
    is_sharded = Capability.BROWSE in has and Capability.ONE_ORDER not in has
    entries += [("Shards", "/shards", is_sharded and grant.all_queues)]
    entries += [("Doctor", "/doctor", Capability.BROWSE in has and grant.all_queues)]
    may_see_actions = grant.has(Role.OPERATE) and grant.all_queues
    entries += [("Actions", "/actions", Capability.ACCESS in has and may_see_actions)]
    inner = path.removeprefix(HOME)
    return [(name, links(to), _is_here(inner, to)) for name, to, shown in entries if shown]


def _is_here(inner: str, to: str) -> bool:
    return inner.rstrip("/") in ("", "/queue") if not to else inner == to or inner.startswith(f"{to}/")


def _refuse_other_sites(request: Request) -> None:
    """Refuse forms that a page of another site sends by a reader's browser."""
    site, origin = request.headers.get("sec-fetch-site"), request.headers.get("origin")
    foreign = site not in ("same-origin", "none") if site is not None else False
    if site is None and origin is not None:
        foreign = urlsplit(origin).netloc != request.headers.get("host")
    if foreign:
        raise forbidden("forms on pages of other sites are refused")


async def _fields(request: Request, *, is_known: bool) -> dict[str, list[str]]:
    """The fields of a form. Callers that are not known yet have less room and time for it."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/x-www-form-urlencoded":
        raise Refuse(415, "WrongType", "send a form of the dashboard")
    try:
        most, within = (_FORM_LIMIT, 60.0) if is_known else (_LOGIN_LIMIT, _LOGIN_WITHIN)
        text = (await decode.body(request, most, within=within)).decode("ascii")
        return parse_qs(
            text, strict_parsing=bool(text), max_num_fields=_MOST_FIELDS, errors="strict", keep_blank_values=True
        )
    except ValueError:
        raise Refuse(400, "InvalidRequest", "the form cannot be read; load the page again") from None
