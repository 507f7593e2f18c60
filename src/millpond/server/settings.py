"""Options of the server."""

from __future__ import annotations

import ipaddress
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import msgspec

from millpond.control.exported_days import LakeFiles
from millpond.errors import InvalidOption
from millpond.server.grants import Grant, Role

Resolver = Callable[[Any], Awaitable[Grant | None]]
"""Gets the request and returns the caller's rights, for applications that have logins."""


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """Bounds that keep one client from stopping the others."""

    body: int = 8 * 1024 * 1024
    """Bytes of a request."""
    rate: float = 5000.0
    """Requests per second of one caller; as many may come at once."""
    connections: int = 2000
    """Requests and streams at one time; more are refused with 503."""
    waiting: int = 1000
    """Claims that wait for messages at one time."""
    longest_wait: float = 60.0
    """Seconds that a claim waits at most."""
    claim: int = 1000
    """Messages of one claim."""
    reply: int = 32 * 1024 * 1024
    """Bytes of bodies after which a claim takes no more messages."""
    batch: int = 10_000
    """Messages, receipts or ids of one request."""


class ServerSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that an operator chooses."""

    host: str = "127.0.0.1"
    port: int = 8420
    grpc_port: int | None = None
    """None: no gRPC. 0 takes a free port."""
    limits: Limits = Limits()
    mask: Mapping[Role, tuple[str, ...]] = {}
    """Queues whose bodies, headers and errors a role does not see."""
    tls_cert: str | None = None
    tls_key: str | None = None
    resolver: Resolver | None = None
    mounted: bool = False
    """Part of another application, whose address is not known: without tokens or a resolver every caller is refused."""
    open_to_all: bool = False
    """Let everyone in: the application around it has checked the caller."""
    root_path: str = ""
    """Prefix that a proxy in front has removed from paths, such as /queue."""
    lake: LakeFiles | None = None
    """Lake whose days the history shows."""
    proxies: str | None = None
    """Addresses of proxies whose X-Forwarded-For and X-Forwarded-Proto count, with commas between."""

    @property
    def is_local(self) -> bool:
        return not self.mounted and is_loopback(self.host)


def is_loopback(host: str) -> bool:
    """Whether only programs of this machine reach the address."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def parse_masks(texts: list[str]) -> dict[Role, tuple[str, ...]]:
    """Masks from texts such as `read:payments.*`."""
    masks: dict[Role, tuple[str, ...]] = {}
    for text in texts:
        name, colon, pattern = text.partition(":")
        if not colon or not pattern or name not in (Role.READ, Role.OPERATE):
            raise InvalidOption(f"--mask {text!r} must be written as read:QUEUE or operate:QUEUE, e.g. read:payments.*")
        masks[Role(name)] = (*masks.get(Role(name), ()), pattern)
    return masks


def parse_root_path(text: str) -> str:
    """The prefix without a slash at its end.

    >>> parse_root_path("/queue/")
    '/queue'
    """
    path = text.rstrip("/")
    if path and (not path.startswith("/") or path.startswith("//") or not path.isprintable() or not path.isascii()):
        raise InvalidOption(f"--root-path {text!r} must begin with one slash, e.g. /queue")
    return path
