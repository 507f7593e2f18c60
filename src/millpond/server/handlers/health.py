"""Health, metrics and the OpenAPI document."""

from __future__ import annotations

from typing import Any

from starlette.responses import JSONResponse, Response

from millpond.server import metrics as metrics_
from millpond.server.handlers.call import Call
from millpond.server.types import Health


async def live(call: Call) -> Health:
    """Whether the process answers."""
    return Health(ok=True)


async def ready(call: Call) -> Any:
    """Whether the database answers and the server is not stopping; otherwise 503."""
    obstacle = await call.state.obstacle()
    return JSONResponse({"ok": obstacle is None, "obstacle": obstacle}, 200 if obstacle is None else 503)


async def metrics(call: Call) -> Response:
    """Counts, ages and requests in the text format of Prometheus."""
    views = [view for view in await call.state.overview() if call.grant.reaches(view.stats.queue)]
    text = metrics_.exposition(views, call.state.metrics, call.state.streams, call.grant.reaches)
    return Response(text, media_type="text/plain; version=0.0.4; charset=utf-8")


async def openapi(call: Call) -> Response:
    """This document."""
    return Response(call.request.app.state.openapi, media_type="application/json")
