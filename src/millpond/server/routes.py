"""The one table of routes and roles. The server, the OpenAPI document, the tests and the reference are made from it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, NamedTuple

from millpond.server import types
from millpond.server.grants import Role
from millpond.server.handlers import health, messages, operations, periodic, settings
from millpond.server.handlers.call import Call

PREFIX = "/api/v1"
Handler = Callable[[Call], Awaitable[Any]]


class Route(NamedTuple):
    """One route. Its queue, if it is part of the path, is checked before the handler runs."""

    method: str
    path: str
    role: Role | None
    """None: no token is needed."""
    handler: Handler
    reply: type
    body: type | None = None
    query: type | None = None
    audited: bool = False
    """An operator's action, which is recorded."""

    @property
    def name(self) -> str:
        return self.handler.__name__.strip("_")

    @property
    def summary(self) -> str:
        return (self.handler.__doc__ or "").strip().split("\n")[0]


_PUBLISH, _CONSUME, _READ, _OPERATE = Role.PUBLISH, Role.CONSUME, Role.READ, Role.OPERATE
_Q = f"{PREFIX}/queues/{{queue}}"

ROUTES: tuple[Route, ...] = (
    Route("GET", "/live", None, health.live, types.Health),
    Route("GET", "/ready", None, health.ready, types.Health),
    Route("GET", "/metrics", _READ, health.metrics, str),
    Route("GET", f"{PREFIX}/openapi.json", None, health.openapi, dict),
    # messages
    Route("POST", f"{_Q}/messages", _PUBLISH, messages.publish, types.PublishReply, types.PublishMessage),
    Route("POST", f"{_Q}/messages/batch", _PUBLISH, messages.publish_many, types.PublishedMany, types.PublishMany),
    Route("POST", f"{PREFIX}/claims", _CONSUME, messages.claim, types.Claimed, types.ClaimRequest),
    Route("POST", f"{PREFIX}/claims/extend", _CONSUME, messages.extend, types.Refused, types.ExtendRequest),
    Route("POST", f"{PREFIX}/claims/ack", _CONSUME, messages.ack, types.Refused, types.ReceiptsRequest),
    Route("POST", f"{PREFIX}/claims/nack", _CONSUME, messages.nack, types.Refused, types.NackRequest),
    Route("POST", f"{PREFIX}/claims/reject", _CONSUME, messages.reject, types.Refused, types.RejectRequest),
    Route("POST", f"{PREFIX}/claims/give-back", _CONSUME, messages.give_back, types.Refused, types.ReceiptsRequest),
    # see
    Route("GET", f"{PREFIX}/queues", _READ, operations.queues, types.Queues),
    Route("GET", _Q, _READ, operations.queue, types.QueueReply),
    Route("GET", f"{PREFIX}/history", _READ, operations.history, types.History, query=types.HistoryQuery),
    Route("GET", f"{PREFIX}/messages", _READ, operations.search, types.Messages, query=types.MessagesQuery),
    Route("GET", f"{PREFIX}/messages/{{id}}", _READ, operations.message, types.MessageReply),
    Route("GET", f"{PREFIX}/messages/{{id}}/why", _READ, operations.why, types.WhyReply),
    Route("GET", f"{PREFIX}/doctor", _READ, operations.doctor, types.Findings),
    Route("GET", f"{PREFIX}/failures", _READ, operations.failures, types.Failures, query=types.FailuresQuery),
    Route("GET", f"{PREFIX}/workers", _READ, operations.workers, types.WorkersReply),
    Route("GET", f"{PREFIX}/workers/{{worker}}/messages", _READ, operations.worker_messages, types.Messages),
    Route("GET", f"{PREFIX}/streams", _READ, operations.streams, types.StreamsReply),
    Route("GET", f"{PREFIX}/shards", _READ, operations.shards, types.ShardsReply),
    Route("GET", f"{PREFIX}/settings", _READ, settings.settings, types.SettingsList, query=types.SettingsQuery),
    Route("GET", f"{PREFIX}/periodic", _READ, periodic.periodic, types.PeriodicReply),
    # change
    Route(
        "POST",
        f"{PREFIX}/periodic",
        _OPERATE,
        periodic.change_periodic,
        types.Done,
        types.PeriodicRequest,
        audited=True,
    ),
    Route(
        "POST",
        f"{PREFIX}/messages/retry",
        _OPERATE,
        operations.retry,
        types.RetriedReply,
        types.IdsRequest,
        audited=True,
    ),
    Route(
        "POST",
        f"{PREFIX}/messages/reschedule",
        _OPERATE,
        operations.reschedule,
        types.Changed,
        types.RescheduleRequest,
        audited=True,
    ),
    Route("POST", f"{PREFIX}/messages/done", _OPERATE, operations.done, types.Changed, types.DoneRequest, audited=True),
    Route(
        "POST",
        f"{PREFIX}/messages/cancel",
        _OPERATE,
        operations.cancel,
        types.CancelledReply,
        types.CancelRequest,
        audited=True,
    ),
    Route(
        "POST",
        f"{_Q}/retry",
        _OPERATE,
        operations.retry_queue,
        types.RetriedReply,
        types.RetryQueueRequest,
        audited=True,
    ),
    Route("POST", f"{_Q}/pause", _OPERATE, operations.pause, types.Done, audited=True),
    Route("POST", f"{_Q}/resume", _OPERATE, operations.resume, types.Done, audited=True),
    Route(
        "POST",
        f"{_Q}/settings",
        _OPERATE,
        settings.change_settings,
        types.SettingsReply,
        types.SettingsRequest,
        audited=True,
    ),
    Route("POST", f"{_Q}/purge", _OPERATE, operations.purge, types.Purged, types.PurgeRequest, audited=True),
    Route("POST", f"{_Q}/replay", _OPERATE, operations.replay, types.ReplayReply, types.ReplayRequest, audited=True),
    Route(
        "POST",
        f"{PREFIX}/streams/{{stream}}/release",
        _OPERATE,
        operations.release_stream,
        types.Released,
        audited=True,
    ),
    Route("GET", f"{PREFIX}/actions", _OPERATE, operations.actions, types.Actions, query=types.ActionsQuery),
)
