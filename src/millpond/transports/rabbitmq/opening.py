"""From a URL to a transport."""

from __future__ import annotations

from typing import Any

from millpond.transports.rabbitmq.options import parse
from millpond.transports.rabbitmq.transport import RabbitTransport
from millpond.transports.url import Url


async def connect(url: Url, **given: Any) -> RabbitTransport:
    """Connect, so that what is wrong with the URL is known at once."""
    transport = RabbitTransport(url, parse(given))
    try:
        await transport.publishing.first()
        await transport.subscribing.first()
    except BaseException:
        await transport.close()
        raise
    return transport
