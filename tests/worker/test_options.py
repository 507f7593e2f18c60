"""Every wrong option raises at once, with its name and the right values."""

from datetime import timedelta
from typing import Any

import pytest

from millpond import Millpond, Retry
from millpond.errors import InvalidOption, InvalidQueue, MillpondError


async def handler(body: dict) -> None: ...


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"max_worker": 3}, "unknown subscriber option 'max_worker'; the nearest one is 'max_workers'"),
        ({"qwertz": 3}, "there are max_workers"),
        ({"max_workers": 0}, "max_workers must be an integer of at least 1, not 0"),
        ({"max_workers": True}, "max_workers"),
        ({"max_workers": "3"}, "max_workers"),
        ({"batch": 0}, "batch"),
        ({"batch": 501}, "batch (501) must not be larger than fetch (500)"),
        ({"gather": 1}, "gather is for batches"),
        ({"fetch": 0}, "fetch"),
        ({"overfetch": 0.5}, "overfetch must be 1 or more"),
        ({"prefetch_for": -1}, "prefetch_for"),
        ({"min_poll": 2, "max_poll": 1}, "min_poll must not be longer than max_poll"),
        ({"max_poll": 0, "min_poll": 0}, "max_poll must be longer than zero"),
        ({"lease": 0}, "lease must be longer than zero"),
        ({"lease": -1}, "lease"),
        ({"lease": float("inf")}, "lease"),
        ({"lease": "30"}, "lease must be seconds or a timedelta"),
        ({"heartbeat": 0}, "heartbeat must be longer than zero"),
        ({"heartbeat": 30}, "heartbeat must be shorter than lease"),
        ({"timeout": 0}, "timeout must be longer than zero"),
        ({"max_crashes": 0}, "max_crashes"),
        ({"max_deliveries": 0}, "max_deliveries"),
        ({"ack_policy": "nack"}, "ack_policy must be an AckPolicy"),
        ({"retry": None}, "retry must be a Retry"),
        ({"retry": Retry}, "retry must be a Retry"),
        ({"keep_acked": "no"}, "keep_acked must be True or False"),
        ({"cancel_lost": None}, "cancel_lost"),
    ],
)
def test_options(options: dict[str, Any], words: str) -> None:
    pond = Millpond("memory://")
    with pytest.raises(MillpondError) as e:
        pond.subscriber("q", **options)(handler)
    assert words in str(e.value)
    assert pond.subscriptions == []


@pytest.mark.parametrize("queues", [("",), ("a", " b"), ("x" * 256,)])
def test_queue_names(queues: Any) -> None:
    with pytest.raises(InvalidQueue):
        Millpond("memory://").subscriber(*queues)(handler)


def test_a_subscriber_without_a_queue_or_a_function() -> None:
    with pytest.raises(InvalidOption, match="needs the name of its queue"):
        Millpond("memory://").subscriber()(handler)
    with pytest.raises(InvalidOption, match="a handler is a function"):
        Millpond("memory://").subscriber("q")("no function")  # type: ignore[type-var]


def test_durations_may_be_timedeltas_and_a_queue_named_twice_counts_once() -> None:
    pond = Millpond("memory://")
    pond.subscriber("a", "a", lease=timedelta(minutes=1), timeout=timedelta(hours=1), heartbeat=None)(handler)
    (subscription,) = pond.subscriptions
    assert subscription.queues == ("a",)
    assert (subscription.heartbeat_s, subscription.timeout_s) == (20, 3600)


@pytest.mark.parametrize(
    "options", [{"graceful_timeout": -1}, {"flush_size": 0}, {"flush_interval": "soon"}, {"queues": "q"}]
)
async def test_run_options(options: dict[str, Any]) -> None:
    pond = Millpond("memory://")
    pond.subscriber("q")(handler)
    with pytest.raises(MillpondError):
        await pond.run(signals=False, **options)
    assert pond.worker is None
