"""The options of `connect` as type checkers and editors see them. The structs of each backend check them."""

from __future__ import annotations

import ssl
from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypedDict

from millpond.clock import Clock, Seconds


class ConnectOptions(TypedDict, total=False):
    """Options of a store and of RabbitMQ; docs/reference/options.md describes them."""

    # of a store
    schema: str | None
    table_prefix: str
    pool_size: int
    pool: Any
    tls: ssl.SSLContext | bool | None
    pooler: bool
    notify: bool
    body_limit: int
    dedupe_for: Seconds
    busy_timeout: Seconds
    reconnect_timeout: Seconds
    call_timeout: Seconds
    migrate: bool | None
    clock: Clock
    # of a pond of several shards
    shards: Sequence[str] | None
    reroute: bool
    # on RabbitMQ
    queue_type: Literal["quorum", "classic"]
    queue_arguments: Mapping[str, Any] | None
    declare: bool
    broker_dead_letters: bool
    publisher_channel_pool_size: int
    subscriber_pool_size: int
    subscriber_pool_sizes: Mapping[str, int] | None
    max_connection_channels: int
    connect_max_retries: int
    consumer_timeout: Seconds
    archive: str | None
    archive_options: Mapping[str, Any] | None
