"""The gRPC server beside the HTTP server: TLS, health, reflection."""

from __future__ import annotations

from pathlib import Path

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_health.v1.health import aio as health
from grpc_reflection.v1alpha import reflection

from millpond.errors import InvalidOption
from millpond.server.rpc import wire
from millpond.server.rpc.service import Service
from millpond.server.settings import ServerSettings
from millpond.server.state import ServerState

_BESIDE_MESSAGES = 64 * 1024
_STOP_WITHIN = 5.0


class GrpcServer:
    """A gRPC server. Streams end when the state is stopping; `stop` ends the rest."""

    def __init__(self, state: ServerState) -> None:
        limits = state.settings.limits
        self.service = Service(state)
        self._server = grpc.aio.server(
            options=[
                ("grpc.max_receive_message_length", limits.body),
                ("grpc.max_send_message_length", -1),
                ("grpc.max_metadata_size", _BESIDE_MESSAGES),
                # A client that is gone without a word is noticed.
                ("grpc.keepalive_time_ms", 20_000),
                ("grpc.keepalive_timeout_ms", 10_000),
                ("grpc.http2.min_recv_ping_interval_without_data_ms", 5_000),
                # A connection that sends nothing is closed.
                ("grpc.server_handshake_timeout_ms", 10_000),
                ("grpc.so_reuseport", 0),
            ]
        )
        self._server.add_generic_rpc_handlers((self.service.handler(),))
        self._health = health.HealthServicer()

        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        reflection.enable_server_reflection(
            (wire.SERVICE, health_pb2.DESCRIPTOR.services_by_name["Health"].full_name, reflection.SERVICE_NAME),
            self._server,
        )

    async def start(self, settings: ServerSettings) -> str:
        """Bind and answer; returns the address."""
        host = f"[{settings.host}]" if ":" in settings.host else settings.host
        address = f"{host}:{settings.grpc_port}"
        try:
            if settings.tls_cert is not None and settings.tls_key is not None:
                pair = (Path(settings.tls_key).read_bytes(), Path(settings.tls_cert).read_bytes())
                port = self._server.add_secure_port(address, grpc.ssl_server_credentials([pair]))
            else:
                port = self._server.add_insecure_port(address)
        except RuntimeError as e:
            raise InvalidOption(f"the address {address} cannot be bound; choose another --grpc-port ({e})") from e
        await self._server.start()
        await self._health.set(wire.SERVICE, health_pb2.HealthCheckResponse.SERVING)
        return f"{host}:{port}"

    async def stop(self) -> None:
        await self._health.enter_graceful_shutdown()
        await self._server.stop(_STOP_WITHIN)
        await self.service.streams.close()
