"""Checks of TLS settings that are the same for every backend, and the warning about a connection without TLS."""

from __future__ import annotations

import ipaddress
import logging

from millpond.errors import InvalidURL
from millpond.transports.url import Url

log = logging.getLogger("millpond")

_warned: set[tuple[str, str]] = set()
"""Scheme and hosts of warnings that were logged."""


def truth(url: Url, name: str, default: bool) -> bool:
    """The value of a URL parameter: `true` or `1`, `false` or `0`. Other texts raise: a guess is unsafe."""
    if name not in url.query:
        return default
    value = url.query[name].lower()
    if value not in ("true", "1", "false", "0"):
        raise InvalidURL(f"{name} of the URL {url} must be true or false, not {value!r}")
    return value in ("true", "1")


def is_remote(host: str | None) -> bool:
    """
    >>> [is_remote(host) for host in (None, "localhost", "127.0.0.3", "::1", "/run/postgresql", "db", "10.0.0.1")]
    [False, False, False, False, False, True, True]
    """
    if not host or host.startswith("/") or host == "localhost" or host.endswith(".localhost"):
        return False
    try:
        return not ipaddress.ip_address(host).is_loopback
    except ValueError:
        return True


def warn_if_plain(url: Url, hosts: str | None, *, checked: bool, remedy: str) -> None:
    """Log once that passwords and messages are readable on the way to a remote host. `hosts`: names with commas."""
    if checked or not any(map(is_remote, (hosts or "").split(","))) or (url.scheme, hosts or "") in _warned:
        return
    _warned.add((url.scheme, hosts or ""))
    log.warning("the connection to %s is not encrypted, or its server is not checked: %s", url, remedy)
