"""Versions of RabbitMQ, and the differences that concern us."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from functools import cache
from typing import Any

from millpond.clock import SECOND, micros
from millpond.errors import StoreError
from millpond.transports.rabbitmq.options import RabbitOptions

log = logging.getLogger("millpond.rabbitmq")

Version = tuple[int, int]

_TEXT = re.compile(r"(\d+)\.(\d+)")
_OLDEST = (3, 10)
"""The first version whose quorum queues have lifetimes, and dead-letter at least once."""
_FLAG_REQUIRED = (3, 12)
"""The first version that cannot lack the feature flag for dead-lettering at least once."""
_OWN_DEATHS = (4, 0)
"""The first version that never reads a publisher's header `x-death` when it dead-letters a message."""
_CONSUMER_TIMEOUTS = (4, 3)
"""The first version that takes a timeout from each consumer."""
_ACQUIRED_COUNT = (4, 3)
"""The first version that counts the deliveries of a message in `x-acquired-count`."""


def version_of(properties: Mapping[str, Any]) -> Version | None:
    """Major and minor version of RabbitMQ, from the broker's properties. None: another product."""
    found = _TEXT.match(str(properties.get("version")))
    return (int(found[1]), int(found[2])) if found and properties.get("product") == "RabbitMQ" else None


def check_version(version: Version | None, *, broker_dead_letters: bool) -> None:
    if version is None:
        return
    if version < _OLDEST:
        raise StoreError(
            f"the broker is RabbitMQ {version[0]}.{version[1]}; Millpond needs 3.10 or later, whose quorum queues "
            "dead-letter at least once"
        )
    if version < _FLAG_REQUIRED:
        log.info(
            "RabbitMQ %d.%d dead-letters at least once only with the feature flag stream_queue, which an upgraded "
            "cluster may lack: rabbitmqctl enable_feature_flag stream_queue",
            *version,
        )
    if version < _OWN_DEATHS and broker_dead_letters:
        _warn_of_forged_deaths(*version)


@cache
def _warn_of_forged_deaths(major: int, minor: int) -> None:
    """Once for each version."""
    log.warning(
        "a message with a forged header x-death or BCC that expires in a queue stops all delays and retries of a node "
        "of RabbitMQ %d.%d: upgrade to 4.0 or later, or read docs/reference/rabbitmq.md, Notes on RabbitMQ before 4.0, "
        "if you do not trust all publishers",
        major,
        minor,
    )


def consumer_arguments(version: Version | None, options: RabbitOptions) -> dict[str, Any]:
    """Arguments of a consumer. The broker then takes messages back when our leases can end at the latest."""
    if version is None or version < _CONSUMER_TIMEOUTS or options.queue_type != "quorum":
        return {}
    return {"x-consumer-timeout": micros(options.consumer_timeout, "consumer_timeout") * 1000 // SECOND}


def delivery_counters(version: Version | None) -> tuple[str, ...]:
    """Headers in which a quorum queue counts deliveries. In an older broker the second one is the publisher's."""
    if version is not None and version < _ACQUIRED_COUNT:
        return ("x-delivery-count",)
    return ("x-delivery-count", "x-acquired-count")
