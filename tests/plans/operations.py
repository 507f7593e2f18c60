"""The operations whose plans matter, as steps; each also on an empty table, where plans are made that stay."""

from collections.abc import Sequence
from time import monotonic
from uuid import UUID, uuid4

from millpond import Ack, Claim, GiveBack, Message, Nack, Outcome, Receipt, Reject
from millpond.message import draft
from millpond.transport import Recorded, StreamClaim
from millpond.transports.database import claim as claiming
from millpond.transports.database import publish as publishing
from millpond.transports.database import settle as settling
from millpond.transports.database import statements as sql
from millpond.transports.database import stream_claims, streams
from millpond.transports.database.claim import Lanes, Leases, Stamp
from millpond.transports.database.dialect import Dialect
from millpond.transports.database.statement import Query, Rows, Steps
from tests.plans.readers import Reader
from tests.plans.walls import LANE, QUEUE, URGENT

STAMP = Stamp(token=7, worker=None, lease=60_000_000, now=None)


def known_lanes() -> Lanes:
    lanes = Lanes()
    for lane in (URGENT, LANE):
        lanes.add(lane)
    return lanes


def one_lane(d: Dialect) -> Lanes:
    """As after a claim that was not full, from a queue with one lane."""
    lanes = Lanes()
    lanes.add(LANE)
    lanes.looked_below(lanes.begin() or {}, [LANE], monotonic(), 0.0)
    lanes.claimed(LANE, d.no_floor, None)
    return lanes


def claim(d: Dialect, lanes: Lanes, limit: int, queue: str = QUEUE) -> Steps[list[Claim]]:
    return claiming.claim_queue(d, lanes, queue, limit, STAMP, suspects=True)


def claim_ids(d: Dialect, ids: Sequence[UUID]) -> Steps[list[Claim]]:
    return claiming.claim_ids(d, [QUEUE], [d.id_in(id_) for id_ in ids], len(ids), STAMP)


def settle(d: Dialect, outcomes: Sequence[Outcome]) -> Steps[settling.Settled]:
    return settling.settle(d, outcomes, now=None)


def extend(d: Dialect, receipts: Sequence[Receipt]) -> Steps[list[Receipt]]:
    return settling.extend(d, receipts, 60_000_000, now=None)


def reap(d: Dialect, limit: int) -> Steps[int]:
    ids = yield from claiming.lapsed(d, Leases(), None, limit)
    if not ids:
        ids = [d.id_in(uuid4())]
    return (yield from claiming.release_lapsed(d, ids, None))


def publish(d: Dialect, ids: Sequence[UUID | None]) -> Steps[set[UUID]]:
    drafts = [draft(Message(queue=QUEUE, payload=b"{}", id=id_)) for id_ in ids]
    return publishing.publish(d, drafts, now=None, dedupe_for=1_000_000, own_connection=False)


def recorded(d: Dialect, ids: Sequence[UUID]) -> Steps[Rows]:
    window = {"now": None, "dedupe_for": 1_000_000}
    return (yield Query(d.sql(sql.RECORDED), {"ids": [d.id_in(id_) for id_ in ids], **window}))


def stream_claim(d: Dialect, lanes: dict[str, Lanes], limit: int) -> Steps[stream_claims.Claimed]:
    epoch, acked = yield from streams.open_stream(d, "plans", None, 0, now=None, again=False)
    wanted = stream_claims.Request([QUEUE], limit, 4, None, 3)
    return (yield from stream_claims.claim(d, lanes, "plans", epoch, acked + 1, wanted, now=None))


def stream_ack(d: Dialect, outcomes: Sequence[Recorded], messages: int) -> Steps[None]:
    epoch, acked = yield from streams.open_stream(d, "plans", None, 0, now=None, again=False)
    yield from streams.record_outcomes(d, "plans", outcomes)
    yield from streams.ack(d, "plans", epoch, acked + 1, unsettled="ack", messages=messages, now=None)


def stream_slices(d: Dialect, claim: StreamClaim) -> Steps[int]:
    rows = 0
    for part in claim.slices:
        rest, values = stream_claims.slice_of(d, claim.stream, claim.seq, part)
        rows += len((yield Query(d.sql(f"SELECT payload {rest}"), values)))
    return rows


def stream_ids(d: Dialect, claim: StreamClaim) -> Steps[Rows]:
    text = "SELECT id FROM {stream_message} WHERE stream = :stream AND seq = :seq"
    return (yield Query(d.sql(text), {"stream": claim.stream, "seq": claim.seq}))


def stream_release(d: Dialect) -> Steps[int]:
    return streams.release(d, "plans")


def next_due(d: Dialect) -> Steps[int | None]:
    return claiming.next_due(d, known_lanes(), QUEUE, None)


def everything_once(reader: Reader) -> None:
    d = reader.dialect
    stale = Receipt(uuid4(), 7)
    reader.read(claim(d, known_lanes(), 10))
    reader.read(claim(d, one_lane(d), 10))
    reader.read(claim_ids(d, [stale.id]))
    for outcome in (Ack(stale), Nack(stale, error="no"), Reject(stale, error="no"), GiveBack(stale)):
        reader.read(settle(d, [outcome]))
    reader.read(settle(d, [Reject(stale, error="no"), Reject(Receipt(uuid4(), 7), error="never")]))
    reader.read(extend(d, [stale]))
    reader.read(reap(d, 10))
    reader.read(next_due(d))
    claimed, _ = reader.read(stream_claim(d, {}, 10))
    assert claimed.claim is None
    reader.read(stream_ack(d, [], 0))
    reader.read(recorded(d, [stale.id]))
    reader.read(publish(d, [uuid4(), None]))
