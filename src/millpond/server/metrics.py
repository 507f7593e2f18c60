"""Metrics in the text format of Prometheus."""

from __future__ import annotations

from collections import Counter as Numbers
from collections.abc import Callable, Iterator, Sequence

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from millpond.control import QueueView
from millpond.server.rpc.streams import OpenStreams

_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 60)


class RequestMetrics:
    """Counts and durations of HTTP requests by route, and counts of gRPC calls."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry(auto_describe=True)
        self._requests = Counter(
            "millpond_http_requests", "HTTP requests by route and status", ["route", "status"], registry=self.registry
        )
        self._seconds = Histogram(
            "millpond_http_request_seconds",
            "Duration of HTTP requests by route",
            ["route"],
            buckets=_BUCKETS,
            registry=self.registry,
        )

        self._calls = Counter(
            "millpond_grpc_calls",
            "gRPC calls that ended, by method and code; CANCELLED: the client left",
            ["method", "code"],
            registry=self.registry,
        )

    def add_call(self, method: str, code: str) -> None:
        self._calls.labels(method, code).inc()

    def add(self, route: str, status: int, seconds: float) -> None:
        self._requests.labels(route, str(status)).inc()
        self._seconds.labels(route).observe(seconds)


class _Queues(Collector):
    def __init__(self, views: Sequence[QueueView]) -> None:
        self._views = views

    def collect(self) -> Iterator[Metric]:
        messages = GaugeMetricFamily("millpond_messages", "Messages by queue and state", labels=["queue", "state"])
        oldest = GaugeMetricFamily(
            "millpond_oldest_due_seconds", "Seconds since the oldest waiting message was due", labels=["queue"]
        )
        paused = GaugeMetricFamily("millpond_paused", "1 if claims from the queue are paused", labels=["queue"])
        settled = GaugeMetricFamily(
            "millpond_settled_per_second", "Messages settled a second in the last minute", labels=["queue", "state"]
        )
        for view in self._views:
            queue = view.stats.queue
            for state, number in view.stats.counts.items():
                messages.add_metric([queue, state.value], number)
            oldest.add_metric([queue], view.oldest_for or 0.0)
            paused.add_metric([queue], int(view.stats.paused))
            settled.add_metric([queue, "COMPLETED"], view.completed_per_second)
            settled.add_metric([queue, "FAILED"], view.failed_per_second)
        yield from (messages, oldest, paused, settled)


class _Streams(Collector):
    def __init__(self, streams: OpenStreams, reaches: Callable[[str], bool]) -> None:
        self._streams = streams
        self._reaches = reaches

    def collect(self) -> Iterator[Metric]:
        subscribers = GaugeMetricFamily("millpond_grpc_subscribers", "Open streams by queue", labels=["queue"])
        messages = GaugeMetricFamily(
            "millpond_grpc_outstanding_messages",
            "Messages that streams of this server have and that are not settled",
            labels=["queue"],
        )
        lanes = Numbers(queue for subscriber in self._streams.subscribers for queue in subscriber.queues)
        held = Numbers(sent.facts.queue for sent in self._streams.sent.values())
        for queue in sorted(filter(self._reaches, lanes.keys() | held.keys())):
            subscribers.add_metric([queue], lanes[queue])
            messages.add_metric([queue], held[queue])
        yield from (subscribers, messages)


def exposition(
    views: Sequence[QueueView], requests: RequestMetrics, streams: OpenStreams, reaches: Callable[[str], bool]
) -> bytes:
    """`reaches`: whether the caller may see a queue; `views` has only such queues."""
    queues = CollectorRegistry()
    queues.register(_Queues(views))
    queues.register(_Streams(streams, reaches))
    return bytes(generate_latest(queues) + generate_latest(requests.registry))
