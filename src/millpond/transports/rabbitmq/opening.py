"""From a URL to a transport."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from millpond import transports
from millpond.errors import InvalidOption
from millpond.transport import Capability, Store
from millpond.transports.rabbitmq.options import parse
from millpond.transports.rabbitmq.transport import RabbitTransport
from millpond.transports.url import Url, check_parameters

URL_PARAMETERS = ("heartbeat", "auth", "cafile", "capath", "certfile", "keyfile", "no_verify_ssl")
"""What the driver understands and is of use."""


async def connect(url: Url, **given: Any) -> RabbitTransport:
    """Connect, so that what is wrong with a URL is known at once."""
    options = parse(given)
    check_parameters(url, URL_PARAMETERS, files=("cafile", "certfile", "keyfile"))
    archive = None if options.archive is None else await _archive(options.archive, options.archive_options or {})
    transport = RabbitTransport(url, options, archive)
    try:
        await transport.publishing.first()
    except BaseException:
        await transport.close()
        raise
    return transport


async def _archive(url: Url, options: Mapping[str, Any]) -> Store:
    """The database that settled messages are recorded in."""
    try:
        store = await transports.connect(url.raw, **options)
    except InvalidOption as e:
        raise InvalidOption(f"archive_options: {e}") from None
    if Capability.ARCHIVE in store.capabilities and isinstance(store, Store):
        return store
    await store.close()
    raise InvalidOption(f"archive must be the URL of a database, which keeps settled messages; {url} is none")
