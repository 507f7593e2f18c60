"""Options of the RabbitMQ transport, checked by name and value."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import msgspec

from millpond.checks import check_clock, integer, known_options
from millpond.clock import Clock, Seconds, SystemClock, micros
from millpond.errors import InvalidOption
from millpond.message import BODY_LIMIT, check_name
from millpond.transports.url import Url


class RabbitOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Options of `connect` for amqp:// URLs."""

    queue_type: Literal["quorum", "classic"] = "quorum"
    """Type of the queues that hold messages to be handled. Quorum queues count the deliveries to crashed consumers. For
    classic queues Millpond counts them, and publishes such a message again."""
    queue_arguments: Mapping[str, Any] | None = None
    """Further arguments of new queues, such as `x-quorum-initial-group-size`."""
    broker_dead_letters: bool = True
    """False: new queues have no dead-letter exchange. The broker drops messages that expire or that others reject."""
    declare: bool = True
    """False: all queues exist, and none is declared."""
    publisher_channel_pool_size: int = 25
    """Maximum number of channels that publish. They are opened when needed."""
    subscriber_pool_size: int = 1
    """Number of channels that consume from each queue. With more than one, its messages come in no particular order."""
    subscriber_pool_sizes: Mapping[str, int] | None = None
    """Number of channels that consume from single queues, by the name of the queue. Others: `subscriber_pool_size`."""
    max_connection_channels: int = 1000
    """Maximum number of channels on one connection. A further connection is opened for more."""
    connect_max_retries: int = 25
    """Number of further tries of the first connect before it fails. A later loss is retried without limit."""
    reconnect_timeout: Seconds = 30
    """Seconds that a call waits for a lost connection before `StoreUnavailable`."""
    call_timeout: Seconds = 60
    """Seconds that a call waits for the broker's answer, such as the confirmation of a publish."""
    consumer_timeout: Seconds = 1800
    """The broker's setting of this name, in seconds. No lease can be longer, even if it is extended."""
    archive: Url | None = None
    """URL of a database in which settled messages are recorded before they are acked. None: they are not kept."""
    archive_options: Mapping[str, Any] | None = None
    """Options of the archive's `connect`, such as `schema` and `table_prefix`."""
    body_limit: int = BODY_LIMIT
    clock: Clock = SystemClock()
    """Decides when leases end and messages expire. The broker times delays."""


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
        given = {**given, "archive": Url(given["archive"])}  # masks its password
    options = RabbitOptions(**given)
    if options.queue_type not in ("quorum", "classic"):
        raise InvalidOption(f'queue_type must be "quorum" or "classic", not {options.queue_type!r}')
    if not isinstance(options.queue_arguments, Mapping | None):
        raise InvalidOption(f"queue_arguments must be a dict, not {type(options.queue_arguments).__name__}")
    _check_pool_sizes(options.subscriber_pool_sizes)
    for name in ("broker_dead_letters", "declare"):
        if not isinstance(value := getattr(options, name), bool):
            raise InvalidOption(f"{name} must be True or False, not {value!r}")
    if not isinstance(options.archive_options, Mapping | None):
        raise InvalidOption(f"archive_options must be a dict of options, not {type(options.archive_options).__name__}")
    if options.archive_options and options.archive is None:
        raise InvalidOption("archive_options without archive: give the URL of the archive too")
    for name, (low, high) in _NUMBERS.items():
        integer(getattr(options, name), name, low, high)
    for name in ("reconnect_timeout", "call_timeout", "consumer_timeout"):
        micros(getattr(options, name), name)
    check_clock(options.clock)
    if options.clock.now() is None:
        raise InvalidOption("clock cannot be the database's: a broker has none; give a SystemClock or ManualClock")
    return options


def _check_pool_sizes(sizes: Any) -> None:
    if not isinstance(sizes, Mapping | None):
        raise InvalidOption(f"subscriber_pool_sizes must be a dict of queues and numbers, not {type(sizes).__name__}")
    for queue, size in (sizes or {}).items():
        check_name(queue, "subscriber_pool_sizes")
        integer(size, f"subscriber_pool_sizes of {queue!r}", *_NUMBERS["subscriber_pool_size"])
