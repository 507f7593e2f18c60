"""One request as its handler sees it, and the errors by which a handler refuses it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
from starlette.requests import Request

from millpond.control import Control
from millpond.seam.transport import Transport
from millpond.server.grants import Grant, Role
from millpond.server.state import ServerState


class Refuse(Exception):
    """The request is refused with this status."""

    def __init__(self, status: int, kind: str, text: str) -> None:
        super().__init__(text)
        self.status = status
        self.kind = kind


def forbidden(text: str) -> Refuse:
    return Refuse(403, "Forbidden", text)


def not_found(text: str) -> Refuse:
    return Refuse(404, "NotFound", text)


class Call(msgspec.Struct, frozen=True, kw_only=True):
    """A request whose caller, role, path, query and body were checked."""

    state: ServerState
    request: Request
    grant: Grant
    role: Role | None
    path: Mapping[str, str]
    query: Any = None
    body: Any = None

    @property
    def control(self) -> Control:
        return self.state.control

    @property
    def transport(self) -> Transport:
        return self.state.transport

    @property
    def queue(self) -> str:
        return self.path["queue"]

    def need(self, queue: str, role: Role | None = None) -> None:
        """Refuse unless the caller has the role of this route, or this one, for the queue."""
        if not self.grant.allows(role or self.role or Role.OPERATE, queue):
            raise forbidden(f"your token gives no right to {role or self.role} queue {queue[:80]!r}")

    def need_all_queues(self, what: str) -> None:
        if not self.grant.all_queues:
            raise forbidden(f"{what} needs a token for all queues; name a queue of your token")

    def check_size(self, number: int) -> None:
        most = self.state.settings.limits.batch
        if number > most:
            raise Refuse(413, "TooLarge", f"the request has {number:,} entries, the limit is {most:,}; send several")
