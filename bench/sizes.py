"""Sizes of the measurements: a full run, a quick one during development, a tiny one for tests."""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Sizes:
    rounds: int
    """Rounds begin with fresh tables; the median of their ratios counts."""
    slices: int
    """Turns of each side within a round; a slow period of the machine then affects both."""
    batch: int
    """Messages in a claim or a settle."""
    bulk: int
    """Messages in a bulk publish."""
    single: int
    """Messages published one by one, in a round."""
    bulks: int
    """Bulk publishes in a round."""
    drain: int
    """Messages drained in a round, or nacked."""
    in_flight: int
    """Messages that another consumer holds meanwhile."""
    backlogs: tuple[int, ...]
    """Sizes of backlogs; the others are compared with the first."""
    held: Mapping[str, int]
    """Messages that are drained while a transaction is held open."""
    held_rounds: int
    steady_rate: int
    """Messages a second while a transaction is held open."""
    steady_seconds: float
    memory: int
    """Messages that are drained while the memory of the process is measured."""
    worker: int
    """Messages that workers handle in a round."""
    peers: Mapping[str, int]
    """Messages that other queues handle in a round; fewer for slow ones, whose rates fall with the number."""
    latency: int
    """Messages for which the time to the handler is measured: 20 a second, or 4 a second for their lateness."""
    latency_rounds: int
    pages_messages: tuple[int, int]
    """Pending and archived messages that the dashboard shows."""
    pages: int
    """Requests of each page."""
    clients: tuple[int, int]
    """gRPC streams and HTTP clients of one server."""
    clients_rate: int
    """Messages a second for the streams, and as many for the HTTP clients."""
    clients_seconds: float


FULL = Sizes(
    rounds=7,
    slices=5,
    batch=500,
    bulk=5_000,
    single=1_000,
    bulks=10,
    drain=50_000,
    in_flight=50_000,
    backlogs=(10_000, 1_000_000, 5_000_000),
    held={"postgres": 500_000, "mariadb": 100_000},
    held_rounds=2,
    steady_rate=2_000,
    steady_seconds=300,
    memory=1_000_000,
    worker=50_000,
    peers={"pgqueuer": 50_000, "outbox": 30_000, "sqlbroker": 15_000, "procrastinate": 3_000},
    latency=200,
    latency_rounds=10,
    pages_messages=(1_000_000, 5_000_000),
    pages=60,
    clients=(200, 500),
    clients_rate=500,
    clients_seconds=600,
)
QUICK = Sizes(
    rounds=3,
    slices=5,
    batch=500,
    bulk=5_000,
    single=250,
    bulks=5,
    drain=25_000,
    in_flight=50_000,
    backlogs=(10_000, 200_000),
    held={"postgres": 100_000, "mariadb": 20_000},
    held_rounds=1,
    steady_rate=2_000,
    steady_seconds=60,
    memory=100_000,
    worker=25_000,
    peers={"pgqueuer": 25_000, "outbox": 10_000, "sqlbroker": 5_000, "procrastinate": 1_000},
    latency=100,
    latency_rounds=1,
    pages_messages=(50_000, 250_000),
    pages=20,
    clients=(50, 100),
    clients_rate=200,
    clients_seconds=30,
)
TINY = Sizes(
    rounds=1,
    slices=2,
    batch=20,
    bulk=40,
    single=4,
    bulks=2,
    drain=80,
    in_flight=40,
    backlogs=(80, 200),
    held={"postgres": 80, "mariadb": 80},
    held_rounds=1,
    steady_rate=200,
    steady_seconds=5,
    memory=200,
    worker=80,
    peers={"pgqueuer": 80, "outbox": 80, "sqlbroker": 80, "procrastinate": 80},
    latency=10,
    latency_rounds=1,
    pages_messages=(100, 500),
    pages=4,
    clients=(2, 3),
    clients_rate=20,
    clients_seconds=2,
)
