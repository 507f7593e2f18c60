"""Connections of HTTP clients: the head of a request comes soon, and idle connections give way to new ones."""

from __future__ import annotations

import asyncio
import socket
from typing import Any, cast

from uvicorn.protocols.http.h11_impl import H11Protocol

from millpond.clock import monotonic

_HEAD_WITHIN = 10.0
"""Seconds from the begin of a connection, or from the first byte of a further request, to the end of the head."""


class BoundedConnection(H11Protocol):
    """A connection. `limit_concurrency` of the configuration is the maximum number of open ones.

    uvicorn itself would wait without end for a first byte, and refuse every request, health too, while too many
    connections are open.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._most, self.limit_concurrency = self.limit_concurrency, None
        self._head: asyncio.TimerHandle | None = None
        self._idle_since = monotonic()

    @property
    def _is_idle(self) -> bool:
        """Whether it has no request."""
        return self.cycle is None or self.cycle.response_complete

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(cast(asyncio.Transport, transport))
        # A reply is two writes. asyncio does not set this for the server's own socket, and the second write then waits
        # until the client acknowledges the first one, often for 40 ms.
        if (connection := transport.get_extra_info("socket")) is not None:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._await_head()
        if self._most is not None and len(self.connections) > self._most:
            idle = [one for one in self.connections if isinstance(one, BoundedConnection) and one._is_idle]
            # Those without any request so far first. This one is the youngest: it goes only if all others are busy.
            oldest = min(idle, key=lambda one: (one.cycle is not None, one is self, one._idle_since))
            self.connections.discard(oldest)
            oldest.transport.close()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if not self._is_idle:
            self._forget_head()
        elif self._head is None:
            self._await_head()

    def on_response_complete(self) -> None:
        self._idle_since = monotonic()
        super().on_response_complete()

    def connection_lost(self, exc: Exception | None) -> None:
        self._forget_head()
        super().connection_lost(exc)

    def _await_head(self) -> None:
        self._head = self.loop.call_later(_HEAD_WITHIN, self.transport.close)

    def _forget_head(self) -> None:
        if self._head is not None:
            self._head.cancel()
            self._head = None
