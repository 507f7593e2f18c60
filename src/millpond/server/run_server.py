"""Run the server in this process: sockets, TLS, HTTP and gRPC, and an orderly stop."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from collections.abc import AsyncIterator, Callable, Iterator

import uvicorn

from millpond.errors import InvalidOption
from millpond.seam.transport import Capability, Transport
from millpond.server.application import application
from millpond.server.rpc.grpc_server import GrpcServer
from millpond.server.settings import ServerSettings
from millpond.server.sockets import BoundedConnection
from millpond.server.state import ServerState

log = logging.getLogger("millpond.server")

_STOP_WITHIN = 10
"""Seconds that requests have to finish."""
_IDLE = 100
"""Open connections beside those of requests, before idle ones are closed."""


class _Http(uvicorn.Server):
    """An HTTP server that leaves signals to the program around it."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class RunningServer:
    """A server that answers. `url` and `grpc_address` are the addresses that it has bound."""

    def __init__(self, state: ServerState, url: str, grpc_address: str | None, rpc: GrpcServer | None) -> None:
        self.state = state
        self.url = url
        self.grpc_address = grpc_address
        self.rpc = rpc


async def check(transport: Transport, settings: ServerSettings) -> None:
    """Raise unless the server may start with these settings."""
    if (settings.tls_cert is None) != (settings.tls_key is None):
        raise InvalidOption("--tls-cert and --tls-key belong together; give both")
    if settings.is_local or settings.resolver is not None:
        return
    tokens = await transport.access.tokens() if Capability.ACCESS in transport.capabilities else []
    if not tokens:
        raise InvalidOption(
            f"a server at {settings.host} is reached by other machines, and there is no token; make one first, e.g. "
            "millpond tokens add shop --role publish --queue 'orders.*'"
        )
    if settings.tls_cert is None:
        log.warning(
            "the server at %s has no TLS: tokens and messages pass the network in the clear unless a proxy encrypts "
            "them; give --tls-cert and --tls-key",
            settings.host,
        )


@contextlib.asynccontextmanager
async def serving(transport: Transport, settings: ServerSettings) -> AsyncIterator[RunningServer]:
    """Answer requests while the context is open. The transport stays open."""
    await check(transport, settings)
    state = ServerState(transport, settings)
    bound = _bind(settings.host, settings.port)
    config = uvicorn.Config(
        application(state),
        lifespan="on",
        log_config=None,
        access_log=False,
        server_header=False,
        root_path=settings.root_path,
        proxy_headers=settings.proxies is not None,
        forwarded_allow_ips=settings.proxies,
        http=BoundedConnection,
        limit_concurrency=settings.limits.connections + _IDLE,
        timeout_keep_alive=75,
        timeout_graceful_shutdown=_STOP_WITHIN,
        ssl_certfile=settings.tls_cert,
        ssl_keyfile=settings.tls_key,
        ws="none",
    )
    http = _Http(config)
    rpc: GrpcServer | None = None
    task = asyncio.create_task(http.serve(sockets=[bound]), name="http")
    try:
        while not http.started:
            if task.done():
                await task
                raise InvalidOption(f"the server cannot start at {settings.host}:{settings.port}")
            await asyncio.sleep(0.01)
        scheme = "https" if settings.tls_cert else "http"
        host = f"[{settings.host}]" if ":" in settings.host else settings.host
        if settings.grpc_port is not None:
            rpc = GrpcServer(state)
        address = None if rpc is None else await rpc.start(settings)
        yield RunningServer(state, f"{scheme}://{host}:{bound.getsockname()[1]}", address, rpc)
    finally:
        state.stopping.set()
        if rpc is not None:
            await rpc.stop()
        http.should_exit = True
        await task


async def run(
    transport: Transport,
    settings: ServerSettings,
    started: Callable[[RunningServer], None],
    stopped: asyncio.Event,
) -> None:
    """Serve until `stopped` is set."""
    async with serving(transport, settings) as running:
        started(running)
        await stopped.wait()
        log.info("stopping: requests have %d s to finish", _STOP_WITHIN)


def _bind(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host.strip("[]"), port), family=family, backlog=2048)
    except (OSError, OverflowError) as e:
        raise InvalidOption(f"the address {host}:{port} cannot be bound: {e}; choose another --host or --port") from e
