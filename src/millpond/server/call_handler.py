"""Call the handler of a route, and record an operator's action."""

from __future__ import annotations

import logging
from typing import Any

import msgspec

from millpond.seam.access import Action
from millpond.server.handlers.call import Call
from millpond.server.routes import Route

log = logging.getLogger("millpond.server")

_MOST_LISTED = 10
"""Entries of a list that are recorded."""


async def perform(call: Call, route: Route) -> Any:
    """The reply of the handler. An action is recorded with its result, also if it was refused."""
    if not route.audited:
        return await route.handler(call)
    try:
        reply = await route.handler(call)
    except Exception as e:
        await _recorded(call, route, {"refused": type(e).__name__})
        raise
    await _recorded(call, route, reply)
    return reply


async def _recorded(call: Call, route: Route, reply: Any) -> None:
    """Record an action. It was done or refused: an error of the record does not change the reply."""
    try:
        await _record(call, route, reply)
    except Exception:
        log.error("the action %s by %s was not recorded", route.name, call.grant.name, exc_info=True)


async def _record(call: Call, route: Route, reply: Any) -> None:
    """Record an operator's action. Short lists are recorded whole, long ones as their length and first entries."""
    asked = {} if call.body is None else msgspec.to_builtins(call.body)
    result = reply if isinstance(reply, dict) else msgspec.to_builtins(reply)
    detail = {name: _short(value) for name, value in {**asked, **result}.items() if value not in (None, [], {})}
    action = Action(
        actor=call.grant.name,
        action=route.name,
        queue=call.path.get("queue"),
        detail=msgspec.json.encode({**{k: v for k, v in call.path.items() if k != "queue"}, **detail}).decode(),
    )
    log.info("%s by %s: %s", action.action, action.actor, action.detail, extra={"queue": action.queue})
    if call.state.access is not None:
        await call.state.access.record(action)


def _short(value: Any) -> Any:
    if isinstance(value, dict):
        value = list(value)
    if isinstance(value, list) and len(value) > _MOST_LISTED:
        return {"number": len(value), "first": value[:_MOST_LISTED]}
    return value
