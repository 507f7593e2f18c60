"""Counters of deliveries as RabbitMQ reports them, up to 4.2 and from 4.3 on."""

from __future__ import annotations

import pytest

pytest.importorskip("aiormq")

from millpond.transports.rabbitmq.envelope import Metadata, count_deliveries
from millpond.transports.rabbitmq.frames import Delivered
from millpond.transports.rabbitmq.versions import delivery_counters


@pytest.mark.parametrize(
    ("version", "redelivered", "table", "deliveries"),
    [
        ((4, 3), False, {}, 1),
        ((4, 2), True, {"x-delivery-count": 7}, 8),
        ((4, 3), True, {"x-delivery-count": 1, "x-acquired-count": 7}, 8),  # a nack is not in x-delivery-count
        (None, True, {"x-delivery-count": 1, "x-acquired-count": 7}, 8),
        ((3, 10), True, {"x-delivery-count": 1, "x-acquired-count": 7}, 2),  # the publisher's own
        ((4, 2), True, {"x-acquired-count": 7}, 2),
        ((4, 3), True, {"x-acquired-count": 7}, 8),
        ((4, 3), True, {}, 2),
        ((4, 3), False, {"x-delivery-count": 1_000_000}, 1),  # the publisher's own
        ((4, 3), True, {"x-delivery-count": "many", "x-acquired-count": -5}, 2),
    ],
)
def test_deliveries(
    version: tuple[int, int] | None, redelivered: bool, table: dict[str, object], deliveries: int
) -> None:
    counters = delivery_counters(version)
    message = Delivered("1", 1, redelivered, b"", b"")
    assert count_deliveries(message, table, Metadata(), counters) == deliveries
    assert count_deliveries(message, table, Metadata(deliveries=3), counters) == deliveries + 3
