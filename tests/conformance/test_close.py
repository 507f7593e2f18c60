"""Close: idempotent; afterwards every verb raises `Closed`. A missing ability raises `Unsupported`."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from uuid import uuid4

import pytest

from millpond import Ack, Capability, Receipt, State, Transport, Unsupported
from millpond.errors import Closed, MillpondError, UnknownStream, WrongConnection
from millpond.schedule import Periodic
from millpond.seam.access import Access, Action, StoredToken
from millpond.seam.bulk import Batch, Bulk
from millpond.seam.diagnosis import Diagnosis
from millpond.seam.exports import ExportedRange, Exports
from millpond.seam.operations import Operations, Row
from millpond.seam.periodic import PeriodicMessages
from millpond.seam.streams import RecordedOutcome, Streams
from millpond.seam.transactions import Transactions
from millpond.seam.workers import Workers, message_step
from tests.conformance.conftest import Connect
from tests.conformance.messages import claim_one, message, publish

RECEIPT = Receipt(uuid4(), 1)
STEP = message_step(RECEIPT.id, "charge")
TOKEN = StoredToken(id="t1", name="t", hash="0" * 64, roles=("read",), queues=("*",))
PERIODIC = Periodic(name="none", queue="q", schedule="every 3600")
ROW = Row(
    **{"id": uuid4(), "queue": "q", "key": None, "priority": 50, "state": State.COMPLETED, "headers": {}},
    **{"payload": b"1", "deliveries": 1, "attempts": 1, "due_us": 1, "created_us": 1, "expires_us": None},
    **{"first_attempt_us": 1, "last_attempt_us": 1, "acquired_us": 1, "reason": None, "error": None},
)
NONE, PRESENCE, ARCHIVE, TRANSACTIONS = Capability(0), Capability.PRESENCE, Capability.ARCHIVE, Capability.TRANSACTIONS
STREAMS, BULK, EXPORTS = Capability.STREAMS, Capability.BULK, Capability.EXPORTS
STREAM_STATUS = Capability.STREAM_STATUS
BATCH = Batch("writer")
WITHIN = object()
"""No connection."""

Call = Callable[[Transport], Awaitable[object]]


def sync(call: Callable[[Transport], object]) -> Call:
    async def wrapped(transport: Transport) -> object:
        return call(transport)

    return wrapped


VERBS: dict[str, tuple[Capability, Call]] = {
    "publish": (NONE, lambda t: t.publish([message()])),
    "publish nothing": (NONE, lambda t: t.publish([])),
    "claim": (NONE, lambda t: t.claim(["q"])),
    "claim by id": (Capability.CLAIM_BY_ID, lambda t: t.claim(["q"], ids=[uuid4()])),
    "extend": (Capability.EXTEND, lambda t: t.extend([RECEIPT])),
    "settle": (NONE, lambda t: t.settle([Ack(RECEIPT)])),
    "wait": (NONE, lambda t: t.wait(["q"], 0)),
    "operations.count": (Capability.BROWSE, lambda t: t.operations.count()),
    "operations.browse": (Capability.BROWSE, lambda t: t.operations.browse()),
    "operations.find": (Capability.BROWSE, lambda t: t.operations.find([uuid4()])),
    "operations.has_queue": (NONE, lambda t: t.operations.has_queue("q")),
    "operations.archived": (ARCHIVE, lambda t: t.operations.archived()),
    "operations.rates": (ARCHIVE, lambda t: t.operations.rates(["q"])),
    "operations.history": (ARCHIVE, lambda t: t.operations.history("q")),
    "operations.failures": (ARCHIVE, lambda t: t.operations.failures()),
    "operations.reschedule": (Capability.RESCHEDULE, lambda t: t.operations.reschedule([uuid4()], delay=1)),
    "operations.cancel": (Capability.RESCHEDULE, lambda t: t.operations.cancel([uuid4()])),
    "operations.done": (Capability.RESCHEDULE, lambda t: t.operations.done([uuid4()])),
    "operations.mark_retried": (Capability.RESCHEDULE, lambda t: t.operations.mark_retried([uuid4()])),
    "operations.pause": (Capability.PAUSE, lambda t: t.operations.pause("q")),
    "operations.resume": (Capability.PAUSE, lambda t: t.operations.resume("q")),
    "operations.settings": (Capability.SETTINGS, lambda t: t.operations.settings()),
    "operations.configure": (Capability.SETTINGS, lambda t: t.operations.configure("q", lease=60)),
    "operations.retain": (ARCHIVE, lambda t: t.operations.retain("q", completed=1, failed=None)),
    "operations.purge": (ARCHIVE, lambda t: t.operations.purge(older_than=0)),
    "operations.replay": (ARCHIVE, lambda t: t.operations.replay([], name="again")),
    "operations.record": (ARCHIVE, lambda t: t.operations.record([ROW])),
    "workers.join": (PRESENCE, lambda t: t.workers.join()),
    "workers.reap": (NONE, lambda t: t.workers.reap()),
    "workers.status": (PRESENCE, lambda t: t.workers.status()),
    "workers.stale": (PRESENCE, lambda t: t.workers.stale([RECEIPT])),
    "workers.detach": (PRESENCE, lambda t: t.workers.detach([RECEIPT])),
    "workers.attach": (PRESENCE, lambda t: t.workers.attach([RECEIPT])),
    "workers.cancel": (PRESENCE, lambda t: t.workers.cancel([uuid4()])),
    "workers.cancel_requests": (PRESENCE, lambda t: t.workers.cancel_requests()),
    "workers.begin_step": (PRESENCE, lambda t: t.workers.begin_step(RECEIPT, STEP)),
    "workers.finish_step": (PRESENCE, lambda t: t.workers.finish_step(RECEIPT, STEP, b"1")),
    "periodic.declare": (Capability.PERIODIC, lambda t: t.periodic.declare([PERIODIC])),
    "periodic.all": (Capability.PERIODIC, lambda t: t.periodic.all()),
    "periodic.change": (Capability.PERIODIC, lambda t: t.periodic.change("none", paused=True)),
    "periodic.remove": (Capability.PERIODIC, lambda t: t.periodic.remove("none")),
    "periodic.publish_due": (Capability.PERIODIC, lambda t: t.periodic.publish_due()),
    "access.tokens": (Capability.ACCESS, lambda t: t.access.tokens()),
    "access.add_token": (Capability.ACCESS, lambda t: t.access.add_token(TOKEN)),
    "access.remove_token": (Capability.ACCESS, lambda t: t.access.remove_token("t")),
    "access.had_tokens": (Capability.ACCESS, lambda t: t.access.had_tokens()),
    "access.reset_tokens": (Capability.ACCESS, lambda t: t.access.reset_tokens()),
    "access.record": (Capability.ACCESS, lambda t: t.access.record(Action(actor="me", action="pause"))),
    "access.actions": (Capability.ACCESS, lambda t: t.access.actions()),
    "diagnosis.circumstances": (Capability.BROWSE, lambda t: t.diagnosis.circumstances(uuid4())),
    "diagnosis.shards": (Capability.BROWSE, lambda t: t.diagnosis.shards()),
    "diagnosis.examine": (Capability.BROWSE, lambda t: t.diagnosis.examine()),
    "streams.open": (STREAMS, lambda t: t.streams.open("s", epoch=7)),
    "streams.claim": (STREAMS, lambda t: t.streams.claim("s", 7, 1, ["q"], 10)),
    "streams.recorded": (STREAM_STATUS, lambda t: t.streams.recorded("s", 7, 1)),
    "streams.hand_out": (STREAMS, lambda t: t.streams.hand_out("s", 7, 1, "checkpoint")),
    "streams.record": (STREAMS, lambda t: t.streams.record("s", [RecordedOutcome(uuid4(), "ack")])),
    "streams.ack": (STREAMS, lambda t: t.streams.ack("s", 7, 1)),
    "streams.status": (STREAM_STATUS, lambda t: t.streams.status()),
    "streams.waiting": (STREAM_STATUS, lambda t: t.streams.waiting(["q"])),
    "streams.release": (STREAM_STATUS, lambda t: t.streams.release("s")),
    "bulk.load": (BULK, lambda t: t.bulk.load(BATCH, [])),
    "bulk.published": (BULK, lambda t: t.bulk.published(BATCH)),
    "bulk.publish": (BULK, lambda t: t.bulk.publish(BATCH, {})),
    "bulk.collect": (BULK, lambda t: t.bulk.collect(BATCH)),
    "bulk.collect_orphans": (BULK, lambda t: t.bulk.collect_orphans()),
    "exports.open": (EXPORTS, lambda t: t.exports.open("lake", shard=0, path="/lake", until=None)),
    "exports.close_archive": (EXPORTS, lambda t: t.exports.close_archive(None)),
    "exports.advance": (EXPORTS, lambda t: t.exports.advance("lake", [ExportedRange(None, 1, 0)])),
    "exports.redate": (EXPORTS, lambda t: t.exports.redate("lake", [])),
    "exports.recount": (EXPORTS, lambda t: t.exports.recount("lake", 1, 0, [])),
    "exports.status": (EXPORTS, lambda t: t.exports.status()),
    "exports.forget": (EXPORTS, lambda t: t.exports.forget("lake")),
    "transactions.publish_sync": (
        TRANSACTIONS,
        sync(lambda t: t.transactions.publish_sync([message()], within=WITHIN)),
    ),
    "transactions.settle_sync": (
        TRANSACTIONS,
        sync(lambda t: t.transactions.settle_sync([Ack(RECEIPT)], within=WITHIN)),
    ),
    "transactions.once": (TRANSACTIONS, lambda t: t.transactions.once(uuid4(), "charge", within=WITHIN)),
    "transactions.once_sync": (
        TRANSACTIONS,
        sync(lambda t: t.transactions.once_sync(uuid4(), "charge", within=WITHIN)),
    ),
    "transactions.learn_from": (TRANSACTIONS, sync(lambda t: t.transactions.learn_from(t.transactions))),
}
IN_MEMORY_TOO = {
    *("workers.status", "workers.stale", "workers.detach", "workers.attach", "workers.cancel"),
    *("workers.cancel_requests", "workers.begin_step", "workers.finish_step"),
}
"""Verbs of workers that memory has, although no worker can join there."""
WITHOUT_CONNECTION = {f"transactions.{verb}" for verb in ("publish_sync", "settle_sync", "once", "once_sync")}
"""Here they get an object that is no connection."""
PROTOCOLS = {
    "operations": Operations,
    "workers": Workers,
    "periodic": PeriodicMessages,
    "access": Access,
    "diagnosis": Diagnosis,
    "streams": Streams,
    "bulk": Bulk,
    "exports": Exports,
    "transactions": Transactions,
}


def test_every_verb_of_these_rooms_is_tried() -> None:
    verbs = {f"{room}.{name}" for room, protocol in PROTOCOLS.items() for name in vars(protocol) if name[0] != "_"}
    assert verbs <= set(VERBS)


async def raised(call: Call, transport: Transport) -> MillpondError | None:
    try:
        await call(transport)
    except MillpondError as e:
        return e
    return None


async def test_after_close_every_verb_says_so(transport: Transport) -> None:
    await transport.close()
    for verb, (capability, call) in VERBS.items():
        if verb == "transactions.learn_from":
            continue  # needs no connection
        expected = Closed if capability in transport.capabilities else (Closed, Unsupported)
        assert isinstance(await raised(call, transport), expected), verb


async def test_closing_twice_is_harmless(transport: Transport) -> None:
    await transport.close()
    await transport.close()
    await asyncio.gather(transport.close(), transport.close())


async def test_closing_one_handle_leaves_the_others(transport: Transport, connect: Connect) -> None:
    other = await connect()
    await publish(transport)
    await transport.close()
    claim = await claim_one(other)
    assert await other.settle([Ack(claim.receipt)]) == []


async def test_close_while_calls_are_under_way(transport: Transport) -> None:
    """Close while publishing is safe: each call ends with its result or with `Closed`."""
    calls = [asyncio.create_task(transport.publish([message()])) for _ in range(10)]
    await asyncio.sleep(0)
    await transport.close()
    for result in await asyncio.gather(*calls, return_exceptions=True):
        assert isinstance(result, list | Closed), result


async def test_what_it_cannot_do_it_says(transport: Transport) -> None:
    for verb, (capability, call) in VERBS.items():
        error = await raised(call, transport)
        in_memory = Capability.SHARED not in transport.capabilities
        if capability in transport.capabilities or (in_memory and verb in IN_MEMORY_TOO):
            if verb == "streams.release" and STREAMS not in transport.capabilities:
                assert isinstance(error, UnknownStream)  # none can be opened here
                continue
            assert isinstance(error, WrongConnection) if verb in WITHOUT_CONNECTION else error is None, verb
        else:
            assert isinstance(error, Unsupported) and str(capability.name) in str(error), verb


async def test_without_transactions_within_is_refused(transport: Transport) -> None:
    if Capability.TRANSACTIONS in transport.capabilities:
        return  # tests/transactions
    for call in (
        lambda: transport.publish([message()], within=object()),
        lambda: transport.settle([Ack(RECEIPT)], within=object()),
    ):
        with pytest.raises(Unsupported, match="TRANSACTIONS"):
            await call()
    with pytest.raises(Unsupported, match="TRANSACTIONS"):
        transport.transactions.publish_sync([message()], within=object())
    with pytest.raises(Unsupported, match="TRANSACTIONS"):
        transport.transactions.settle_sync([Ack(RECEIPT)], within=object())
    assert await transport.claim(["q"]) == []
