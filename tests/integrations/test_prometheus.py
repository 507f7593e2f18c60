"""Counters and durations in a registry of Prometheus."""

from prometheus_client import CollectorRegistry, generate_latest

from millpond import Millpond, NackMessage
from millpond.integrations.prometheus import instrument


async def test_messages_and_handlers_are_counted() -> None:
    pond, registry = Millpond("memory://"), CollectorRegistry()
    instrument(pond, registry)
    running = []

    @pond.subscriber("orders")
    def ship(order: int) -> None:
        running.append(registry.get_sample_value("millpond_running_messages", labels))
        if order == 13:
            raise ValueError("out of stock")
        if order == 14:
            raise NackMessage(delay=60)

    labels = {"queue": "orders", "handler": ship.__qualname__}
    async with pond.testing(raise_errors=False) as test:
        await pond.publish_many("orders", [1, 13, 14])
        await test.run()

    def value(name: str, **more: str) -> float | None:
        return registry.get_sample_value(name, {"queue": "orders", **more})

    assert value("millpond_published_messages_total") == value("millpond_claimed_messages_total") == 3
    assert value("millpond_settled_messages_total", outcome="ack") == 1
    assert value("millpond_settled_messages_total", outcome="nack") == 2
    assert value("millpond_handler_seconds_count", handler=ship.__qualname__) == 3
    assert value("millpond_handler_errors_total", handler=ship.__qualname__, error="ValueError") == 1
    assert value("millpond_handler_errors_total", handler=ship.__qualname__, error="NackMessage") is None
    assert max(running) >= 1
    assert registry.get_sample_value("millpond_running_messages", labels) == 0
    assert b"millpond_call_seconds_bucket" in generate_latest(registry)
