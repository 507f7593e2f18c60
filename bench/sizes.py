"""How much each measurement does: a full run for people, a quick one while working, a tiny one for tests."""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Sizes:
    rounds: int
    """Rounds begin with fresh tables; the median of their ratios counts."""
    slices: int
    """Turns that each side takes within a round, so that a slow moment of the machine hits both."""
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
    """Messages that somebody else holds meanwhile."""
    backlogs: tuple[int, ...]
    """The first is what the others are compared with."""
    held: Mapping[str, int]
    """Messages that pass while a transaction is held open."""
    held_rounds: int
    memory: int
    """Messages that pass while the process's memory is watched."""
    worker: int
    """Messages that workers handle in a round."""
    peers: Mapping[str, int]
    """Messages that other queues handle in a round; fewer where they are slow, and the fewer the faster they are."""
    latency: int
    """Messages, 20 a second, whose way to the handler is timed."""
    latency_rounds: int


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
    memory=1_000_000,
    worker=50_000,
    peers={"pgqueuer": 50_000, "outbox": 30_000, "sqlbroker": 15_000, "procrastinate": 3_000},
    latency=200,
    latency_rounds=5,
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
    memory=100_000,
    worker=25_000,
    peers={"pgqueuer": 25_000, "outbox": 10_000, "sqlbroker": 5_000, "procrastinate": 1_000},
    latency=100,
    latency_rounds=1,
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
    memory=200,
    worker=80,
    peers={"pgqueuer": 80, "outbox": 80, "sqlbroker": 80, "procrastinate": 80},
    latency=10,
    latency_rounds=1,
)
