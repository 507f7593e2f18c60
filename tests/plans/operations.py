"""Operations on the hot path, as steps. Each also runs on an empty table: plans made there are kept."""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any
from uuid import UUID, uuid4

from millpond import Ack, Claim, GiveBack, Message, Nack, Outcome, Receipt, Reject
from millpond.clock import SECOND
from millpond.message import draft
from millpond.seam.operations import Failure, QueueHistory
from millpond.seam.streams import RecordedOutcome, StreamClaim
from millpond.transports.database.arrow.slices import claim_piece
from millpond.transports.database.messages import claim as claiming
from millpond.transports.database.messages.hints import Hints, new_lanes
from millpond.transports.database.messages.lanes import Lanes
from millpond.transports.database.messages.publish import insert_drafts
from millpond.transports.database.messages.reap import LeaseRows, lapsed_ids, release_lapsed
from millpond.transports.database.messages.settle import SettleResult, extend_leases, write_outcomes
from millpond.transports.database.messages.suspects import claim_suspect
from millpond.transports.database.operations.failures import failure_groups
from millpond.transports.database.operations.rates import settled_buckets
from millpond.transports.database.operations.record import KNOWN
from millpond.transports.database.sql.dialect import Dialect
from millpond.transports.database.sql.statement import Query, Rows, Steps
from millpond.transports.database.sql.writes import Stamp
from millpond.transports.database.streams import claims as stream_claims
from millpond.transports.database.streams.streams import DatabaseStreams
from tests.plans.readers import Reader
from tests.plans.walls import LANE, QUEUE, URGENT
from tests.stores import steps_of

STAMP = Stamp(token=7, worker=None, lease=60_000_000, now=None)


def known_lanes(d: Dialect) -> Lanes:
    lanes = new_lanes(d)
    for lane in (URGENT, LANE):
        lanes.add(lane)
    return lanes


def claim(d: Dialect, lanes: Lanes, limit: int, queue: str = QUEUE) -> Steps[list[Claim]]:
    return claiming.claim_queue(d, lanes, queue, limit, STAMP, suspects=True)


def suspect(d: Dialect) -> Steps[list[Claim]]:
    return claim_suspect(d, QUEUE, STAMP)


def claim_ids(d: Dialect, ids: Sequence[UUID]) -> Steps[list[Claim]]:
    return d.writes.claim_ids([QUEUE], [d.id_in(id_) for id_ in ids], len(ids), STAMP)


def adopt(d: Dialect) -> Steps[list[Claim]]:
    return claiming.adopt(d, STAMP)


def settle(d: Dialect, outcomes: Sequence[Outcome]) -> Steps[SettleResult]:
    return write_outcomes(d, outcomes, now=None)


def extend(d: Dialect, receipts: Sequence[Receipt]) -> Steps[list[Receipt]]:
    return extend_leases(d, receipts, 60_000_000, now=None)


def reap(d: Dialect, limit: int) -> Steps[int]:
    ids = yield from lapsed_ids(d, LeaseRows(), None, limit)
    if not ids:
        ids = [d.id_in(uuid4())]
    return (yield from release_lapsed(d, ids, None))


def publish(d: Dialect, ids: Sequence[UUID | None]) -> Steps[set[UUID]]:
    drafts = [draft(Message(queue=QUEUE, payload=b"{}", id=id_)) for id_ in ids]
    return insert_drafts(d, drafts, now=None, dedupe_for=1_000_000, own_connection=False)


def recorded(d: Dialect, ids: Sequence[UUID]) -> Steps[Rows]:
    window = {"now": None, "dedupe_for": 1_000_000}
    return (yield Query(d.sql(KNOWN), {"ids": [d.id_in(id_) for id_ in ids], **window}))


def streams_on(d: Dialect) -> DatabaseStreams:
    """The streams room for its steps, without a connection."""
    runner: Any = SimpleNamespace(dialect=d, now=lambda: None)
    return DatabaseStreams(runner, Hints(d))


def stream_claim(d: Dialect, hints: Hints, limit: int) -> Steps[stream_claims.MadeClaim]:
    epoch, acked = yield from streams_on(d).open_steps("plans", None, 0, again=False)
    wanted = stream_claims.StreamRequest([QUEUE], limit, 4, None)
    return (yield from stream_claims.make_claim(d, hints, "plans", epoch, acked + 1, wanted, now=None))


def stream_ack(d: Dialect, outcomes: Sequence[RecordedOutcome], messages: int) -> Steps[None]:
    room = streams_on(d)
    epoch, acked = yield from room.open_steps("plans", None, 0, again=False)
    yield from steps_of(room.record_some, "plans", outcomes)
    yield from steps_of(room.ack, "plans", epoch, acked + 1, messages=messages)


def stream_slices(d: Dialect, claim: StreamClaim) -> Steps[int]:
    rows = 0
    for part in claim.slices:
        piece = claim_piece(d, claim.stream, claim.seq, part)
        rows += len((yield Query(d.sql(f"SELECT payload {piece.rest}"), piece.params)))
    return rows


def stream_ids(d: Dialect, claim: StreamClaim) -> Steps[Rows]:
    text = "SELECT id FROM {stream_message} WHERE stream = :stream AND seq = :seq"
    return (yield Query(d.sql(text), {"stream": claim.stream, "seq": claim.seq}))


def stream_release(d: Dialect) -> Steps[int]:
    return steps_of(streams_on(d).release_all, "plans")


def failures(d: Dialect, queue: str | None) -> Steps[list[Failure]]:
    return failure_groups(d, queue, 100)


def history(d: Dialect, limit: int) -> Steps[QueueHistory]:
    return settled_buckets(d, QUEUE, 3600 * SECOND, 24, None, limit, None)


def next_due(d: Dialect) -> Steps[int | None]:
    return claiming.next_due(d, known_lanes(d), QUEUE, None)


def everything_once(reader: Reader) -> None:
    d = reader.dialect
    stale = Receipt(uuid4(), 7)
    lanes = known_lanes(d)
    reader.read(claim(d, lanes, 10))
    lanes.fall()
    reader.read(claim(d, lanes, 10))
    reader.read(claim(d, lanes, 10))
    reader.read(suspect(d))
    reader.read(claim_ids(d, [stale.id]))
    reader.read(adopt(d))
    for outcome in (Ack(stale), Nack(stale, error="no"), Reject(stale, error="no"), GiveBack(stale)):
        reader.read(settle(d, [outcome]))
    reader.read(settle(d, [Reject(stale, error="no"), Reject(Receipt(uuid4(), 7), error="never")]))
    reader.read(extend(d, [stale]))
    reader.read(reap(d, 10))
    reader.read(next_due(d))
    claimed, _ = reader.read(stream_claim(d, Hints(d), 10))
    assert claimed.claim is None
    reader.read(stream_ack(d, [], 0))
    reader.read(recorded(d, [stale.id]))
    reader.read(publish(d, [uuid4(), None]))
    for queue in (None, QUEUE):
        reader.read(failures(d, queue))
    reader.read(history(d, 100))
