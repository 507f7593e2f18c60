"""The ASGI application: each route is limited, authorised, decoded, called, encoded and recorded in one place."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from typing import Any

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route as StarletteRoute
from starlette.types import ASGIApp, Receive, Scope, Send

from millpond.clock import monotonic
from millpond.message import check_name
from millpond.server import authorize, decode
from millpond.server.call_handler import perform
from millpond.server.dashboard import serving as dashboard
from millpond.server.grants import ANYONE, Grant
from millpond.server.handlers.call import Call, Refuse, forbidden
from millpond.server.openapi import document
from millpond.server.problems import ErrorReply, error_reply, problem
from millpond.server.routes import ROUTES, Route
from millpond.server.state import ServerState

HEADERS = {
    "cache-control": "no-store",
    "content-security-policy": "default-src 'none'; frame-ancestors 'none'",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
}
"""Headers of every reply: nothing is cached, guessed or shown in a frame."""

Endpoint = Callable[[Request], Awaitable[Response]]


def application(state: ServerState, *, close: Callable[[], Awaitable[None]] | None = None) -> Starlette:
    """The application of a server. `close` is awaited when it stops."""

    @contextlib.asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        yield
        await state.close()
        if close is not None:
            await close()

    routes = [
        # The name of a queue may have slashes.
        StarletteRoute(r.path.replace("{queue}", "{queue:path}"), _endpoint(state, r), methods=[r.method], name=r.name)
        for r in ROUTES
    ]
    routes += dashboard.routes(state)
    app = Starlette(
        routes=routes,
        lifespan=lifespan,
        exception_handlers={HTTPException: _http_error},
        middleware=[Middleware(_OneLength)],
    )
    app.state.server = state
    app.state.openapi = document(ROUTES)
    return app


class _OneLength:
    """Refuses requests whose body has two lengths, and ends their connection.

    A proxy may believe the other length. The rest would then be a request of its own, with the rights of the next
    caller on this connection.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if {name for name, _ in scope.get("headers", ())} >= {b"content-length", b"transfer-encoding"}:
            text = "the request has both Content-Length and Transfer-Encoding; send one"
            refusal = problem(ErrorReply(400, "InvalidRequest", text, {"connection": "close"}))
            refusal.headers.update(HEADERS)
            await refusal(scope, receive, send)
        else:
            await self._app(scope, receive, send)


def _endpoint(state: ServerState, route: Route) -> Endpoint:
    async def endpoint(request: Request) -> Response:
        started = monotonic()
        try:
            # Health is always answered: a busy server must not be restarted.
            with contextlib.nullcontext() if route.role is None else state.connections.one():
                response = await _answer(state, route, request)
        except Exception as e:
            response = problem(error_reply(e))
        state.metrics.add(route.path, response.status_code, monotonic() - started)
        response.headers.update(HEADERS)
        return response

    return endpoint


async def _answer(state: ServerState, route: Route, request: Request) -> Response:
    if route.role is None:
        return _encoded(await perform(await _checked(state, route, request), route))
    grant = await _granted(state, route, request)
    with state.connections.share(grant.name):
        return _encoded(await perform(await _checked(state, route, request, grant), route))


async def _granted(state: ServerState, route: Route, request: Request) -> Grant:
    """The rights of the caller, which include this route."""
    grant = await authorize.caller(state, request)
    if grant is None:
        raise Refuse(401, "Unauthorized", "send a token of this server: Authorization: Bearer mp_…")
    state.rates.take(grant.name)
    if route.role is not None and not grant.has(route.role):
        raise forbidden(f"this needs a token with the role {route.role}")
    authorize.refuse_foreign_pages(request)
    return grant


async def _checked(state: ServerState, route: Route, request: Request, grant: Grant = ANYONE) -> Call:
    """The call, after every check that needs no handler."""
    path: Mapping[str, str] = request.path_params
    if "queue" in path and route.role is not None:
        check_name(path["queue"], "queue")
        if not grant.reaches(path["queue"]):
            raise forbidden(f"your token gives no right to queue {path['queue'][:80]!r}")
    return Call(
        state=state,
        request=request,
        grant=grant,
        role=route.role,
        path=path,
        query=None if route.query is None else decode.query(request, route.query),
        body=None if route.body is None else await _body(state, request, route.body),
    )


async def _body(state: ServerState, request: Request, kind: type) -> Any:
    return msgspec.json.decode(await decode.body(request, state.settings.limits.body) or b"{}", type=kind)


def _encoded(reply: Any) -> Response:
    if isinstance(reply, Response):
        return reply
    return Response(msgspec.json.encode(reply, enc_hook=str), media_type="application/json")


async def _http_error(request: Request, error: Exception) -> Response:
    """No such path, or a method that it does not have."""
    assert isinstance(error, HTTPException)
    kind = "NotFound" if error.status_code == 404 else "HttpError"
    response = problem(ErrorReply(error.status_code, kind, error.detail))
    response.headers.update({**HEADERS, **(error.headers or {})})
    return response
