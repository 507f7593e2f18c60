"""The options of the RabbitMQ transport, checked by name and value."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import msgspec

from millpond.clock import Clock, Seconds, SystemClock, micros
from millpond.errors import InvalidOption
from millpond.message import BODY_LIMIT
from millpond.transports.arguments import known_options
from millpond.transports.url import Url


class RabbitOptions(msgspec.Struct, frozen=True, kw_only=True):
    """What `connect` takes beside the URL."""

    queue_type: Literal["quorum", "classic"] = "quorum"
    """Of the queues that hold messages to be handled. What crashed consumers were sent is counted by quorum queues,
    and for classic ones by us, who publish it again."""
    publisher_channel_pool_size: int = 25
    """Channels that publish, opened as they are needed."""
    subscriber_pool_size: int = 1
    """Channels that consume from each queue. More than one share its messages in no particular order."""
    max_connection_channels: int = 1000
    """Channels on one connection; beyond, a further connection is opened."""
    connect_max_retries: int = 25
    """How often connecting is tried again before it fails. A connection that is lost later is sought for ever."""
    reconnect_timeout: Seconds = 30
    """How long a call waits for a lost connection before `StoreUnavailable`."""
    call_timeout: Seconds = 60
    """How long a call waits for the broker's answer, such as the confirmation of a publish."""
    consumer_timeout: Seconds = 1800
    """The broker's own setting of this name: no lease can be longer, however often it is extended."""
    archive: Url | None = None
    """The URL of a database in which settled messages are recorded before they are acked; None: they leave no trace."""
    archive_options: Mapping[str, Any] | None = None
    """What `connect` takes beside the archive's URL, such as `schema` and `table_prefix`."""
    body_limit: int = BODY_LIMIT
    clock: Clock = SystemClock()
    """Decides when leases end and messages expire. Delays are timed by the broker."""


_NUMBERS = {
    "publisher_channel_pool_size": (1, 10_000),
    "subscriber_pool_size": (1, 10_000),
    "max_connection_channels": (1, 2_000),
    "connect_max_retries": (0, 1_000_000),
    "body_limit": (1, 128 << 20),
}


def parse(given: dict[str, Any]) -> RabbitOptions:
    known_options(given, RabbitOptions.__struct_fields__)
    if given.get("archive") is not None:
        given = {**given, "archive": Url(given["archive"])}  # which never shows its password
    options = RabbitOptions(**given)
    if options.queue_type not in ("quorum", "classic"):
        raise InvalidOption(f'queue_type must be "quorum" or "classic", not {options.queue_type!r}')
    if not isinstance(options.archive_options, Mapping | None):
        raise InvalidOption(f"archive_options must be a dict of options, not {type(options.archive_options).__name__}")
    if options.archive_options and options.archive is None:
        raise InvalidOption("archive_options without archive: give the URL of the archive too")
    for name, (low, high) in _NUMBERS.items():
        value = getattr(options, name)
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            raise InvalidOption(f"{name} must be a whole number from {low} to {high:,}, not {value!r}")
    for name in ("reconnect_timeout", "call_timeout", "consumer_timeout"):
        micros(getattr(options, name), name)
    if options.clock.now() is None:
        raise InvalidOption("a broker has no clock that could be asked; give a SystemClock or ManualClock")
    return options
