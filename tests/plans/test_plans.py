"""Every statement of the hot path reads rows in proportion to its result, not to the size of the tables."""

from uuid import uuid4

import pytest

from millpond import Ack, Claim, GiveBack, Nack, Outcome, Receipt, Reject
from millpond.seam.streams import RecordedOutcome, Settlement
from millpond.transports.database.messages.hints import Hints, new_lanes
from tests.plans import operations
from tests.plans.readers import Reader
from tests.plans.walls import DUE, LANE, LAPSED, QUEUE

# The first test on each database waits until half a million rows are made.
pytestmark = [pytest.mark.timeout(900), pytest.mark.slow]

BATCH = 100
A_FEW = 60
"""Rows that an operation may read beside its result: probes, the pause of a queue, neighbours."""


def claimed(reader: Reader, count: int = BATCH) -> list[Claim]:
    claims, _ = reader.read(operations.claim(reader.dialect, operations.known_lanes(reader.dialect), count))
    assert len(claims) == count
    return claims


def test_the_first_claim_steps_over_rows_in_other_queues_and_urgent_ones_of_the_future(
    reader: Reader,
) -> None:
    claims, rows = reader.read(operations.claim(reader.dialect, new_lanes(reader.dialect), BATCH))
    assert len(claims) == BATCH
    assert {claim.message.priority for claim in claims} == {LANE}
    assert rows <= 4 * BATCH + A_FEW
    assert not reader.scans()


@pytest.mark.parametrize("batch", [1, BATCH, DUE])
def test_a_claim_reads_rows_in_proportion_to_its_batch(reader: Reader, batch: int) -> None:
    lanes = operations.known_lanes(reader.dialect)
    claims, rows = reader.read(operations.claim(reader.dialect, lanes, batch))
    assert len(claims) == batch
    assert rows <= 4 * batch + A_FEW
    assert not reader.scans()


def test_a_claim_that_begins_where_the_last_ended(reader: Reader) -> None:
    lanes = operations.known_lanes(reader.dialect)
    reader.read(operations.claim(reader.dialect, lanes, BATCH))
    claims, rows = reader.read(operations.claim(reader.dialect, lanes, BATCH))
    assert len(claims) == BATCH
    assert rows <= 4 * BATCH + A_FEW
    assert not reader.scans()


@pytest.mark.parametrize("queue", [QUEUE, "other-3"])
def test_a_claim_after_another(reader: Reader, queue: str) -> None:
    """One of the queues has one lane: the claim needs no search for lanes."""
    lanes = new_lanes(reader.dialect)
    reader.read(operations.claim(reader.dialect, lanes, 1, queue))
    claims, rows = reader.read(operations.claim(reader.dialect, lanes, BATCH, queue))
    assert len(claims) == BATCH
    assert rows <= 4 * BATCH + A_FEW
    assert not reader.scans()


def test_a_claim_that_finds_nothing_reads_nothing(reader: Reader) -> None:
    lanes = operations.known_lanes(reader.dialect)
    reader.read(operations.claim(reader.dialect, lanes, DUE))
    claims, rows = reader.read(operations.claim(reader.dialect, lanes, BATCH))
    assert claims == []
    assert rows <= A_FEW + DUE  # the database may step over the rows that were just claimed
    assert not reader.scans()


def test_a_claim_of_suspects(reader: Reader) -> None:
    """Usually there is none."""
    claims, rows = reader.read(operations.suspect(reader.dialect))
    assert (claims, reader.scans()) == ([], []) and rows <= A_FEW
    claims = claimed(reader, 2)
    for _ in range(2):
        reader.read(operations.settle(reader.dialect, [GiveBack(c.receipt, crashed=True) for c in claims]))
        for claim in claims:
            reader.read(operations.claim_ids(reader.dialect, [claim.receipt.id]))
    reader.read(operations.settle(reader.dialect, [GiveBack(c.receipt, crashed=True) for c in claims]))
    (suspect,), rows = reader.read(operations.suspect(reader.dialect))
    assert suspect.crashes == 3 and rows <= A_FEW
    assert not reader.scans()


@pytest.mark.parametrize("below", [0, BATCH])
def test_a_look_below_the_floors(reader: Reader, below: int) -> None:
    d, lanes = reader.dialect, operations.known_lanes(reader.dialect)
    claims, _ = reader.read(operations.claim(d, lanes, 2 * BATCH))
    reader.read(operations.settle(d, [GiveBack(claim.receipt) for claim in claims[:below]]))
    lanes.fall()
    again, rows = reader.read(operations.claim(d, lanes, BATCH))
    assert len(again) == BATCH
    if below:
        assert {claim.receipt.id for claim in again} == {claim.receipt.id for claim in claims[:below]}
    assert rows <= 8 * BATCH + A_FEW
    assert not reader.scans()


def test_a_claim_by_id(reader: Reader) -> None:
    ids = [claim.receipt.id for claim in claimed(reader)]
    reader.rollback()
    claims, rows = reader.read(operations.claim_ids(reader.dialect, ids))
    assert len(claims) == BATCH
    assert rows <= 5 * BATCH + A_FEW
    assert not reader.scans()


def test_after_a_lost_reply_the_claimed_rows_only_are_read(reader: Reader) -> None:
    claims = claimed(reader)
    adopted, rows = reader.read(operations.adopt(reader.dialect))
    assert [claim.receipt for claim in adopted] == [claim.receipt for claim in claims]
    assert rows <= 4 * BATCH + A_FEW
    assert not reader.scans()


@pytest.mark.parametrize("verb", ["ack", "nack", "reject", "reject each", "give back"])
def test_a_settle_reads_its_own_rows_only(reader: Reader, verb: str) -> None:
    def outcome(receipt: Receipt) -> Outcome:
        match verb:
            case "ack":
                return Ack(receipt)
            case "nack":
                return Nack(receipt, delay=5, error="no")
            case "reject":
                return Reject(receipt, error="no")
            case "reject each":
                return Reject(receipt, error=str(receipt.id))
            case _:
                return GiveBack(receipt)

    claims = claimed(reader)
    settled, rows = reader.read(operations.settle(reader.dialect, [outcome(c.receipt) for c in claims]))
    assert (settled.refused, settled.locked) == ([], [])
    assert rows <= 6 * BATCH + A_FEW
    assert not reader.scans()


def test_a_stale_settle_looks_at_its_own_rows_only(reader: Reader) -> None:
    stale = [Receipt(uuid4(), 7) for _ in range(BATCH)]
    settled, rows = reader.read(operations.settle(reader.dialect, [Ack(receipt) for receipt in stale]))
    assert settled.refused == stale
    assert rows <= 6 * BATCH + A_FEW
    assert not reader.scans()


def test_an_extend_reads_its_own_rows_only(reader: Reader) -> None:
    claims = claimed(reader)
    refused, rows = reader.read(operations.extend(reader.dialect, [claim.receipt for claim in claims]))
    assert refused == []
    assert rows <= 4 * BATCH + A_FEW
    assert not reader.scans()


def test_a_reaper_reads_lapsed_leases_only(reader: Reader) -> None:
    count, rows = reader.read(operations.reap(reader.dialect, 2 * LAPSED))
    assert count == LAPSED
    assert rows <= 5 * LAPSED + A_FEW
    assert not reader.scans()


def test_ids_of_callers_are_looked_up_by_their_indexes(reader: Reader) -> None:
    ids = [uuid4() for _ in range(BATCH)]
    new, rows = reader.read(operations.publish(reader.dialect, ids))
    assert new.new == set(ids)
    assert rows <= 8 * BATCH + A_FEW
    assert not reader.scans()


def test_what_was_recorded_is_looked_up_by_its_ids(reader: Reader) -> None:
    _, rows = reader.read(operations.recorded(reader.dialect, [uuid4() for _ in range(BATCH)]))
    assert rows <= 4 * BATCH + A_FEW
    assert not reader.scans()


@pytest.mark.parametrize("outcome", ["ack", "nack", "reject", "release"])
def test_a_stream_reads_the_messages_of_its_batch_only(reader: Reader, outcome: Settlement) -> None:
    d = reader.dialect
    claimed, rows = reader.read(operations.stream_claim(d, Hints(d), BATCH))
    assert claimed.claim.messages == BATCH
    assert rows <= 12 * BATCH + A_FEW
    found, rows = reader.read(operations.stream_slices(d, claimed.claim))
    assert found == BATCH
    assert rows <= 4 * BATCH + A_FEW
    if outcome == "release":
        released, rows = reader.read(operations.stream_release(d))
        assert released == BATCH
    else:
        ids = [d.id_out(row[0]) for row in reader.read(operations.stream_ids(d, claimed.claim))[0]]
        decided = [RecordedOutcome(id_, outcome, 5, "no") for id_ in ids[: BATCH // 2]]
        _, rows = reader.read(operations.stream_ack(d, decided, BATCH))
    assert rows <= 20 * BATCH + A_FEW
    assert not reader.scans()


def test_how_long_to_wait_is_one_look_into_each_lane(reader: Reader) -> None:
    wait, rows = reader.read(operations.next_due(reader.dialect))
    assert wait is not None
    assert rows <= A_FEW
    assert not reader.scans()


@pytest.mark.parametrize("queue", [None, QUEUE])
def test_groups_of_failures_read_failures_only(reader: Reader, queue: str | None) -> None:
    rejects = [Reject(claim.receipt, error=f"KeyError: {n % 2}") for n, claim in enumerate(claimed(reader))]
    reader.read(operations.settle(reader.dialect, rejects))
    groups, rows = reader.read(operations.failures(reader.dialect, queue))
    assert [(group.queue, group.messages) for group in groups] == [(QUEUE, BATCH)], "alike but for a number"
    assert rows <= 4 * BATCH + A_FEW
    assert not reader.scans()


def test_a_history_reads_as_many_archived_messages_as_its_limit(reader: Reader) -> None:
    found, rows = reader.read(operations.history(reader.dialect, BATCH))
    (bucket,) = found.buckets
    assert (bucket.completed, bucket.at_least) == (BATCH, True)
    assert rows <= 4 * BATCH + A_FEW
    assert not [scan for scan in reader.scans() if not scan.startswith("SCAN c:")], "SQLite names the limited part too"
