"""Failed attempts are kept with a message, bounded, and open failures are found in groups."""

from __future__ import annotations

import pytest

from millpond import Ack, ManualClock, Nack, Reject, State, Transport
from millpond.failed_attempts import HISTORY_LIMIT
from millpond.transports.database.operations import rates as rates_module
from tests.rooms.operations.lives import claim, message, publish


async def test_a_message_that_succeeds_at_once_has_no_history(store: Transport) -> None:
    (id_,) = await publish(store, message())
    (held,) = await claim(store)
    await store.settle([Ack(held.receipt)])
    (row,) = await store.operations.find([id_])
    assert (row.history, row.failed_attempts) == (None, [])


async def test_each_failed_attempt_is_kept_with_times_error_and_traceback(store: Transport, clock: ManualClock) -> None:
    (id_,) = await publish(store, message())
    (first,) = await claim(store)
    claimed_us = first.claimed_us
    clock.advance(2)
    await store.settle([Nack(first.receipt, 0, "ValueError: no", "Traceback …\nValueError: no\n", 1.5)])
    (live,) = await store.operations.find([id_])
    (attempt,) = live.failed_attempts
    assert (attempt.claimed_us, attempt.ended_us) == (claimed_us, claimed_us + 2_000_000)
    assert (attempt.error, attempt.took) == ("ValueError: no", 1.5)
    assert attempt.traceback == "Traceback …\nValueError: no\n"
    (second,) = await claim(store)
    await store.settle([Reject(second.receipt, "never again")])
    (failed,) = await store.operations.find([id_])
    assert [attempt.error for attempt in failed.failed_attempts] == ["ValueError: no", "never again"]
    assert failed.state is State.FAILED


async def test_the_history_outlives_a_success_and_stays_out_of_pages(store: Transport) -> None:
    (id_,) = await publish(store, message())
    (held,) = await claim(store)
    await store.settle([Nack(held.receipt, 0, "once")])
    assert (await store.operations.browse("q"))[0].history is None
    (held,) = await claim(store)
    await store.settle([Ack(held.receipt)])
    assert (await store.operations.archived("q"))[0].history is None
    assert [attempt.error for attempt in (await store.operations.find([id_]))[0].failed_attempts] == ["once"]


async def test_the_history_is_bounded_and_has_the_last_attempts(store: Transport) -> None:
    (id_,) = await publish(store, message())
    for number in range(12):
        (held,) = await claim(store)
        trace = f"{number:03} " + "x" * 3990
        await store.settle([Nack(held.receipt, 0, f"error {number}", trace)])
    (row,) = await store.operations.find([id_])
    assert row.history is not None and len(row.history) <= HISTORY_LIMIT
    kept = [attempt.error for attempt in row.failed_attempts]
    assert kept == [f"error {number}" for number in range(12 - len(kept), 12)]
    assert len(kept) >= 4


@pytest.mark.parametrize("text", ["\x00", "\ud800", "🦆", "a\nb 1 2 {}", "'; DROP TABLE message; --"])
async def test_hostile_errors_are_kept_as_text(store: Transport, text: str) -> None:
    ids = await publish(store, message(), message())
    held = await claim(store, number=2)
    await store.settle([Nack(held[0].receipt, 0, text, text), Reject(held[1].receipt, text or "r", text)])
    for row in await store.operations.find(ids):
        (attempt,) = row.failed_attempts
        assert attempt.error


async def test_alike_failures_are_one_group_until_they_are_published_again(
    store: Transport, clock: ManualClock
) -> None:
    await publish(store, *(message() for _ in range(3)), message("other"))
    held = await claim(store, number=3)
    outcomes = [Reject(held[n].receipt, "error", f"KeyError: 'order-{n}' at 0x7f{n}") for n in range(2)]
    await store.settle([*outcomes, Reject(held[2].receipt, "error", "TypeError: no")])
    clock.advance(1)
    (other,) = await claim(store, "other")
    await store.settle([Reject(other.receipt, "error", "KeyError: 'x' at 0x1")])

    groups = await store.operations.failures()
    assert next((group.queue, group.messages) for group in groups) == ("other", 1)
    assert sorted(group.messages for group in groups) == [1, 1, 2]
    alike = next(group for group in groups if group.messages == 2)
    assert alike.error is not None and alike.error.startswith("KeyError")
    rows = await store.operations.archived("q", failure=alike.fingerprint)
    assert {row.id for row in rows} == {claim.receipt.id for claim in held[:2]}

    await store.operations.replay([rows[0].id], name="retry")
    assert [group.messages for group in await store.operations.failures("q") if group.error] == [1, 1]


async def test_rates_count_the_last_seconds_only(store: Transport, clock: ManualClock) -> None:
    for _ in range(2):
        await publish(store, message(), message())
        done, failed = await claim(store, number=2)
        await store.settle([Ack(done.receipt), Reject(failed.receipt)])
        clock.advance(100)
    await publish(store, message())
    (held,) = await claim(store)
    await store.settle([Ack(held.receipt)])
    (rates,) = await store.operations.rates(["q"], over=60)
    assert (rates.completed, rates.failed, rates.approximate) == (1, 0, False)
    (rates,) = await store.operations.rates(["q"], over=150)
    assert (rates.completed, rates.failed) == (2, 1)


async def test_more_messages_than_are_counted_have_the_rate_of_the_newest(
    store: Transport, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rates_module, "_MOST", 4)
    for _ in range(6):  # two in ten seconds
        await publish(store, message(), message())
        await store.settle([Ack(one.receipt) for one in await claim(store, number=2)])
        clock.advance(10)
    (rates,) = await store.operations.rates(["q"], over=60)
    assert (rates.completed, rates.failed, rates.approximate) == (12, 0, True)
