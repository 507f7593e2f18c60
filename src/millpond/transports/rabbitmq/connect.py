"""From a URL to a transport."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from urllib.parse import quote, urlencode, urlsplit

from millpond import transports
from millpond.errors import InvalidOption, InvalidURL
from millpond.seam.transport import Capability, Transport
from millpond.transports.rabbitmq.options import RabbitOptions, parse
from millpond.transports.rabbitmq.transport import RabbitTransport
from millpond.transports.tls import truth, warn_if_plain
from millpond.transports.url import Url, check_parameters

URL_PARAMETERS = ("heartbeat", "auth", "cafile", "capath", "certfile", "keyfile", "no_verify_ssl")
"""Parameters of the driver that are useful here."""
_LONGEST_HEARTBEAT = 65_534
TLS_PARAMETERS = ("cafile", "capath", "certfile", "keyfile", "no_verify_ssl")


def check_options(given: dict[str, Any]) -> RabbitOptions:
    """Parse the options, and check those of the archive."""
    options = parse(given)
    if options.archive is not None:
        try:
            transports.check(options.archive.raw, **(options.archive_options or {}))
        except InvalidOption as e:
            raise InvalidOption(f"archive_options: {e}") from None
    return options


def check_address(url: Url) -> None:
    check_parameters(url, URL_PARAMETERS)
    check_values(url)


def check_values(url: Url) -> None:
    """The driver would take another value for none: no heartbeats, another way to log in."""
    heartbeat, auth = url.query.get("heartbeat", "60"), url.query.get("auth", "plain")
    if not (
        heartbeat.isascii() and heartbeat.isdigit() and len(heartbeat) < 6 and int(heartbeat) <= _LONGEST_HEARTBEAT
    ):
        raise InvalidURL(
            f"heartbeat of the URL {url} must be a number of seconds from 0 (none) to {_LONGEST_HEARTBEAT}, not "
            f"{heartbeat!r}"
        )
    if auth.lower() not in ("plain", "external"):
        raise InvalidURL(f"auth of the URL {url} must be plain or external, not {auth!r}")


async def connect(url: Url, **given: Any) -> RabbitTransport:
    """Connect at once, because errors of the URL should not wait for the first call."""
    options = check_options(given)
    check_values(url)
    url = check_tls(url)
    archive = None if options.archive is None else await _archive(options.archive, options.archive_options or {})
    transport = RabbitTransport(url, options, archive)
    try:
        await transport.publisher_pool.connect()
    except BaseException:
        await transport.close()
        raise
    return transport


def check_tls(url: Url) -> Url:
    """Check the URL's parameters, and return it with a `no_verify_ssl` that the driver understands.

    The driver checks no certificate for any value but 0.
    """
    check_parameters(url, URL_PARAMETERS, files=("cafile", "certfile", "keyfile"))
    unchecked = truth(url, "no_verify_ssl", False)
    if url.scheme != "amqps" and (given := [name for name in TLS_PARAMETERS if name in url.query]):
        raise InvalidURL(f"{given[0]} of the URL {url} has no effect without TLS: write amqps://")
    if "keyfile" in url.query and "certfile" not in url.query:
        raise InvalidURL(f"keyfile of the URL {url} needs certfile")
    remedy = "use amqps://, without no_verify_ssl"
    warn_if_plain(url, url.host, checked=url.scheme == "amqps" and not unchecked, remedy=remedy)
    if "no_verify_ssl" not in url.query:
        return url
    query = urlencode({**url.query, "no_verify_ssl": int(unchecked)}, quote_via=quote)
    return Url(urlsplit(url.raw)._replace(query=query).geturl())


async def _archive(url: Url, options: Mapping[str, Any]) -> Transport:
    """Connect to the database that records settled messages."""
    store = await transports.connect(url.raw, **options)
    if Capability.ARCHIVE in store.capabilities:
        return store
    await store.close()
    raise InvalidOption(f"archive must be the URL of a database, which keeps settled messages, not {url}")
