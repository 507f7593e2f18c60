"""The table of pages and roles, as `routes.py` has it for programs."""

from __future__ import annotations

from starlette.responses import Response

from millpond.server import types
from millpond.server.dashboard import actions, live_counts, login, pages, rendering
from millpond.server.grants import Role
from millpond.server.routes import Route

_READ, _OPERATE = Role.READ, Role.OPERATE
_D = rendering.HOME

PAGES: tuple[Route, ...] = (
    Route("GET", "/", None, pages.root, Response),
    Route("GET", _D, _READ, pages.overview, Response, query=pages.OverviewQuery),
    Route("GET", f"{_D}/queue", _READ, pages.queue, Response, query=pages.QueueQuery),
    Route("GET", f"{_D}/messages", _READ, pages.messages, Response, query=types.MessagesQuery),
    Route("GET", f"{_D}/messages/{{id}}", _READ, pages.message, Response),
    Route("GET", f"{_D}/failures", _READ, pages.failures, Response, query=types.FailuresQuery),
    Route("GET", f"{_D}/workers", _READ, pages.workers, Response),
    Route("GET", f"{_D}/workers/{{worker}}", _READ, pages.worker, Response),
    Route("GET", f"{_D}/periodic", _READ, pages.periodic, Response, query=pages.PeriodicQuery),
    Route("GET", f"{_D}/streams", _READ, pages.streams, Response),
    Route("GET", f"{_D}/shards", _READ, pages.shards, Response),
    Route("GET", f"{_D}/doctor", _READ, pages.doctor, Response),
    Route("GET", f"{_D}/actions", _OPERATE, pages.actions, Response, query=types.ActionsQuery),
    Route("GET", f"{_D}/find", _READ, pages.find, Response, query=pages.FindQuery),
    Route("GET", f"{_D}/events", _READ, live_counts.events, Response),
    Route("POST", f"{_D}/confirm", _OPERATE, actions.confirm, Response),
    Route("POST", f"{_D}/act", _OPERATE, actions.act, Response),
    Route("POST", f"{_D}/login", None, login.log_in, Response),
    Route("POST", f"{_D}/logout", None, login.log_out, Response),
    Route("GET", f"{_D}/assets/{{name}}", None, rendering.asset, Response),
)
