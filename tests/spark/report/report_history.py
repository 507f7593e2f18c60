"""A short history, written by hand to the second, and the report that it must give.

Times are seconds after 08:00 on 1 March 2026. Percentiles are nearest ranks: of ten waiting times the 90th is the ninth
from below.
"""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID

import millpond
from millpond import Ack, Claim, GiveBack, ManualClock, Message, Nack, Reject

START = datetime(2026, 3, 1, 8, tzinfo=UTC)
ORDERS, MAIL = "orders", "mäil <script>alert('q')</script>"
HOSTILE_ERROR = "ValueError: </script><img src=x onerror=alert('e')> & \"quotes\" \u2028 \x1b[31m"
NOW = START + timedelta(seconds=7200)


def after(seconds: float) -> datetime:
    return START + timedelta(seconds=seconds)


def id_of(name: str) -> UUID:
    return UUID(int=int.from_bytes(name.encode(), "big"))


class History:
    """The verbs of a transport at ascending times."""

    def __init__(self, store: Any, clock: ManualClock) -> None:
        self._store = store
        self._clock = clock
        self._past = 0.0

    def _at(self, seconds: float) -> None:
        self._clock.advance(timedelta(seconds=seconds) - timedelta(seconds=self._past))
        self._past = seconds

    async def publish(self, at: float, queue: str, *names: str, **more: Any) -> None:
        self._at(at)
        await self._store.publish([Message(queue=queue, id=id_of(name), payload=b"{}", **more) for name in names])

    async def claim(self, at: float, queue: str, name: str, lease: float = 600) -> Claim:
        self._at(at)
        (claim,) = await self._store.claim([queue], 1, lease=lease, ids=[id_of(name)])
        assert claim.receipt.id == id_of(name)
        found: Claim = claim
        return found

    async def settle(self, at: float, outcome: Any) -> None:
        self._at(at)
        assert await self._store.settle([outcome]) == []

    async def crash(self, at: float, queue: str, name: str) -> None:
        """The process of a message dies."""
        claim = await self.claim(at, queue, name)
        await self.settle(at + 2, GiveBack(claim.receipt, crashed=True))

    async def cancel(self, at: float, name: str) -> None:
        self._at(at)
        assert await self._store.operations.cancel([id_of(name)]) == [id_of(name)]


def write(url: str) -> None:
    asyncio.run(_write(url))


async def _write(url: str) -> None:
    clock = ManualClock(START)
    store = await millpond.connect(url, migrate=True, clock=clock)
    h = History(store, clock)
    # 08:00: five that wait 1, 2, 3, 4 and 10 seconds and run for 0.1, 0.2, 0.3, 0.4 and 0.5.
    await h.publish(0, ORDERS, "o1", "o2", "o3", "o4", "o5")
    for name, at, took in (("o1", 1, 0.1), ("o2", 2, 0.2), ("o3", 3, 0.3), ("o4", 4, 0.4), ("o5", 10, 0.5)):
        claim = await h.claim(at, ORDERS, name)
        await h.settle(at + took, Ack(claim.receipt))
    # 09:00: one that is retried, and then waits 3 s and runs 2 s.
    await h.publish(3600, ORDERS, "o6", "o7", "o8", "o9")
    await h.publish(3600, MAIL, "m1", "m2", "l5")
    claim = await h.claim(3601, ORDERS, "o6")
    await h.settle(3602, Nack(claim.receipt, delay=10, error="ValueError: odd"))
    claim = await h.claim(3615, ORDERS, "o6")
    await h.settle(3617, Ack(claim.receipt))
    # One that is rejected: it waited 20 s and ran 1 s.
    claim = await h.claim(3620, ORDERS, "o7")
    await h.settle(3621, Reject(claim.receipt, "bad sku", error=HOSTILE_ERROR))
    # One whose retries are used up: at last it waited 1 s and ran 1 s.
    claim = await h.claim(3630, ORDERS, "o8")
    await h.settle(3631, Nack(claim.receipt, delay=0, error="TimeoutError: slow"))
    claim = await h.claim(3632, ORDERS, "o8")
    await h.settle(3633, Reject(claim.receipt, "retries used up", error="TimeoutError: slow"))
    # One that is cancelled: it never ran, nor was it claimed.
    await h.cancel(3640, "o9")
    # One that crashes twice before it is acked: it waited 70 s and ran 1 s.
    await h.crash(3650, MAIL, "m1")
    await h.crash(3660, MAIL, "m1")
    claim = await h.claim(3670, MAIL, "m1")
    await h.settle(3671, Ack(claim.receipt))
    # One that fails without running: it waited 80 s.
    claim = await h.claim(3680, MAIL, "m2")
    await h.settle(3681, Reject(claim.receipt, "max_crashes", attempted=False))
    # Live at 10:00: one due since 09:01:40, one for later, one that waits for its retry, one in processing ...
    await h.publish(3700, ORDERS, "l1", "l3", "l4")
    await h.publish(3700, ORDERS, "l2", delay=9000)
    claim = await h.claim(3710, ORDERS, "l3")
    await h.settle(3711, Nack(claim.receipt, delay=9000, error="ValueError: odd"))
    await h.claim(3720, ORDERS, "l4", lease=9000)
    # ... and one, due since 09:00, that crashed twice.
    await h.crash(3800, MAIL, "l5")
    await h.crash(3810, MAIL, "l5")
    await store.close()


def _sums(counts: str, waiting: str, handling: str, first: float, last: float) -> dict[str, Any]:
    """Values in the order of the columns; - is null."""
    names = ["settled", "completed", "failed", "retried", "retries", "redeliveries", "unfinished"]
    return {
        **dict(zip(names, map(int, counts.split()), strict=True)),
        **{
            f"{time}_{suffix}_s": None if value == "-" else float(value)
            for time, values in (("waiting", waiting), ("handling", handling))
            for suffix, value in zip(("p50", "p90", "p99", "max"), values.split(), strict=True)
        },
        "first_at": after(first),
        "last_at": after(last),
    }


# settled completed failed retried retries redeliveries unfinished; p50 p90 p99 max of waiting, of handling
_ORDERS_8 = _sums("5 5 0 0 0 0 0", "3 10 10 10", "0.3 0.5 0.5 0.5", 1.1, 10.5)
_ORDERS_9 = _sums("4 1 3 2 2 2 0", "3 20 20 20", "1 2 2 2", 3617, 3640)
_MAIL_9 = _sums("2 1 1 0 0 2 3", "70 80 80 80", "1 1 1 1", 3671, 3681)
# waiting 1 1 2 3 3 4 10 20; handling 0.1 0.2 0.3 0.4 0.5 1 1 2
_ORDERS = _sums("9 6 3 2 2 2 0", "3 20 20 20", "0.4 2 2 2", 1.1, 3640)
# waiting 1 3 20 70 80; handling 1 1 1 2
_ALL_9 = _sums("6 2 4 2 2 4 3", "20 80 80 80", "1 2 2 2", 3617, 3681)
# waiting 1 1 2 3 3 4 10 20 70 80; handling 0.1 0.2 0.3 0.4 0.5 1 1 1 2
_ALL = _sums("11 7 4 2 2 4 3", "3 70 80 80", "0.5 2 2 2", 1.1, 3681)
_TIME = 3681 - 1.1


def _message(
    queue: str, name: str, counts: str, waiting: float, handling: float, at: float, **more: Any
) -> dict[str, Any]:
    deliveries, attempts = map(int, counts.split())
    return {
        "queue": queue,
        "id": str(id_of(name)),
        "state": "COMPLETED",
        "reason": None,
        "error": None,
        "deliveries": deliveries,
        "attempts": attempts,
        "waiting_s": waiting,
        "handling_s": handling,
        "archived_at": after(at),
        **more,
    }


_M1 = _message(MAIL, "m1", "3 1", 70, 1, 3671)
_O8 = {"state": "FAILED", "reason": "retries used up", "error": "TimeoutError: slow"}
EXPECTED: dict[str, list[dict[str, Any]]] = {
    "summary": [{"per_second": 11 / _TIME, **_ALL}],
    "by_queue": [
        {"queue": MAIL, "per_second": 2 / _TIME, **_MAIL_9},
        {"queue": ORDERS, "per_second": 9 / _TIME, **_ORDERS},
    ],
    "by_time": [{"at": after(0), **_ORDERS_8}, {"at": after(3600), **_ALL_9}],
    "by_queue_and_time": [
        {"queue": MAIL, "at": after(3600), **_MAIL_9},
        {"queue": ORDERS, "at": after(0), **_ORDERS_8},
        {"queue": ORDERS, "at": after(3600), **_ORDERS_9},
    ],
    "failures": [
        {
            "queue": queue,
            "reason": reason,
            "exception": exception,
            "failed": 1,
            "first_at": after(at),
            "last_at": after(at),
            "example_id": str(id_of(name)),
            "error": error,
        }
        for queue, reason, exception, at, name, error in (
            (MAIL, "max_crashes", None, 3681, "m2", None),
            (ORDERS, "bad sku", "ValueError", 3621, "o7", HOSTILE_ERROR),
            (ORDERS, "cancelled", None, 3640, "o9", None),
            (ORDERS, "retries used up", "TimeoutError", 3633, "o8", "TimeoutError: slow"),
        )
    ],
    "slowest": [
        # A retried message keeps its last error although it was acked in the end.
        _message(ORDERS, "o6", "2 2", 3, 2, 3617, error="ValueError: odd"),
        _message(ORDERS, "o8", "2 2", 1, 1, 3633, **_O8),
        _message(ORDERS, "o7", "1 1", 20, 1, 3621, state="FAILED", reason="bad sku", error=HOSTILE_ERROR),
        _M1,
        *(
            _message(ORDERS, name, "1 1", waiting, handling, waiting + handling)
            for name, waiting, handling in (("o5", 10, 0.5), ("o4", 4, 0.4), ("o3", 3, 0.3), ("o2", 2, 0.2))
        ),
        _message(ORDERS, "o1", "1 1", 1, 0.1, 1.1),
    ],
    "poisonous": [_M1],
    "backlog": [
        {
            "queue": MAIL,
            "pending": 1,
            "processing": 0,
            "retryable": 0,
            "due": 1,
            "scheduled": 0,
            "suspect": 1,
            "oldest_due_at": after(3600),
            "overdue_s": 3600.0,
        },
        {
            "queue": ORDERS,
            "pending": 2,
            "processing": 1,
            "retryable": 1,
            "due": 1,
            "scheduled": 2,
            "suspect": 0,
            "oldest_due_at": after(3700),
            "overdue_s": 3500.0,
        },
    ],
}
"""Every table, row by row."""
