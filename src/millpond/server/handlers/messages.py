"""Publish, claim with long poll, extend and settle."""

from __future__ import annotations

import asyncio
import base64
import binascii
import functools
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, cast

import msgspec
from msgspec import UNSET

from millpond import codec
from millpond.clock import monotonic
from millpond.errors import BodyNotDecodable, BodyNotEncodable, InvalidMessage, NotUnique, StoreError
from millpond.message import Claim, Message, Published, Unique
from millpond.outcome import Ack, GiveBack, Nack, Outcome, Reject
from millpond.retry import Retry
from millpond.seam.transport import Capability, Transport
from millpond.server import authorize, types
from millpond.server.claim_lines import WaitingCaller
from millpond.server.grants import Role
from millpond.server.handlers.call import Call, Refuse
from millpond.server.receipts import ClaimReceipt, parse_receipt, receipt_text

DEFAULT_RETRY = Retry()
_FIRST = 100
"""Messages that are claimed before the size of bodies is known."""
_CHECK_EVERY = 1.0
"""Seconds after which a waiting claim checks whether its client is still there."""


async def publish(call: Call) -> types.PublishReply:
    """Publish one message."""
    (reply,) = await _publish(call, [call.body])
    return reply


async def publish_many(call: Call) -> types.PublishedMany:
    """Publish messages, in a database all or none."""
    call.check_size(len(call.body.messages))
    return types.PublishedMany(published=await _publish(call, call.body.messages, alone=False))


async def _publish(
    call: Call, given: Sequence[types.PublishMessage], *, alone: bool = True
) -> list[types.PublishReply]:
    messages = [to_message(call.queue, one) for one in given]
    published = await publish_all(call.transport, messages, alone=alone)
    return [
        types.PublishReply(id=p.id, new=p.new, result=None if message.unique is None else cast(types.Effect, p.result))
        for message, p in zip(messages, published, strict=True)
    ]


async def publish_all(transport: Transport, messages: Sequence[Message], *, alone: bool) -> list[Published]:
    """Publish messages. `alone`: the request is for one message, which `on_conflict="raise"` may refuse."""
    if not alone and any(m.unique is not None and m.unique.on_conflict == "raise" for m in messages):
        raise InvalidMessage('on_conflict "raise" is for a single message; of many, read `result` of each')
    published = await transport.publish(messages)
    if alone and published[0].result == "refused":
        raise NotUnique(messages[0].queue, published[0].id)
    return published


def to_message(queue: str, given: types.PublishMessage) -> Message:
    payload, content_type = _payload(given)
    headers = dict(given.headers)
    if content_type is not None:
        headers[codec.CONTENT_TYPE] = content_type
    return Message(
        queue=queue,
        payload=payload,
        id=given.id,
        key=given.key,
        priority=given.priority,
        delay=given.delay,
        due_at=given.due_at,
        expires=given.expires,
        headers=headers,
        unique=_unique(given),
    )


def _unique(given: types.PublishMessage) -> Unique | None:
    rules: Mapping[str, Any] = {
        name: value
        for name, value in (("while_", given.while_), ("on_conflict", given.on_conflict))
        if value is not UNSET
    }
    if given.unique is not None:
        return Unique(given.unique, **rules)
    if rules:
        raise InvalidMessage("while and on_conflict are rules of unique messages; give unique, too")
    return None


def _payload(given: types.PublishMessage) -> tuple[bytes, str | None]:
    """The bytes, and the content type unless it is JSON. JSON is stored as it was sent."""
    if given.base64 is not UNSET:
        if given.body is not UNSET:
            raise InvalidMessage("give either body or base64, not both")
        try:
            return base64.b64decode(given.base64, validate=True), codec.BINARY
        except (ValueError, binascii.Error) as e:
            raise BodyNotEncodable(f"base64 cannot be decoded: {e}") from None
    if given.body is UNSET:
        raise InvalidMessage("the message has no body: give body (JSON) or base64 (bytes)")
    raw = bytes(given.body)
    try:
        value = msgspec.json.decode(raw)
    except (ValueError, RecursionError, msgspec.MsgspecError) as e:
        raise BodyNotEncodable(f"the body is not JSON: {e}") from None
    return codec.encode(value) if isinstance(value, str) else (raw, None)


def body_fields(payload: bytes, content_type: str | None) -> dict[str, Any]:
    """`body` with JSON values or text, or `base64` with other bytes."""
    try:
        value = codec.decode(payload, content_type)
    except BodyNotDecodable:
        value = payload
    if isinstance(value, bytes):
        return {"base64": base64.b64encode(value).decode()}
    return {"body": value if isinstance(value, str) else msgspec.Raw(payload)}


async def claim(call: Call) -> types.Claimed:
    """Claim messages; wait for them up to `wait` seconds."""
    wanted: types.ClaimRequest = call.body
    for queue in wanted.queues:
        call.need(queue)
    limits = call.state.settings.limits
    if wanted.limit > limits.claim:
        raise InvalidMessage(f"limit must be at most {limits.claim}")
    waits = wanted.wait > 0
    is_behind = waits and call.state.lines.any_waits(wanted.queues)
    claims = [] if is_behind else await _claim(call, wanted, wanted.queues)
    if not claims and waits:
        with call.state.waiting.one(), call.state.waiting.share(call.grant.name):
            claims = await _wait(call, wanted, monotonic() + min(wanted.wait, limits.longest_wait))
    if claims and await call.request.is_disconnected():
        await call.transport.settle([GiveBack(claim.receipt) for claim in claims])
        claims = []
    return types.Claimed(claims=[claimed(claim) for claim in claims])


async def _claim(call: Call, wanted: types.ClaimRequest, queues: Sequence[str]) -> list[Claim]:
    """Claim messages up to a number of bytes: the size of the first ones decides about the rest."""
    left = call.state.settings.limits.reply
    claims: list[Claim] = []
    number = min(wanted.limit, _FIRST)
    while number > 0:
        try:
            more = await call.transport.claim(queues, number, wanted.lease)
        except StoreError:
            if not claims:
                raise
            break  # the client gets what is claimed; its next claim meets the error
        claims += more
        if len(more) < number:
            break
        sizes = [len(claim.message.payload) for claim in more]
        left -= sum(sizes)
        number = min(wanted.limit - len(claims), left // max(1, *sizes))
    return claims


async def _wait(call: Call, wanted: types.ClaimRequest, until: float) -> list[Claim]:
    """Wait in the lines of the queues for messages."""
    lines = call.state.lines
    claim_from = functools.partial(_claim, call, wanted)
    caller = WaitingCaller(wanted.queues, claim_from, limit=wanted.limit, lease=wanted.lease)
    lines.join(caller)
    try:
        while not caller.claims.done() and (left := until - monotonic()) > 0:
            if call.state.stopping.is_set() or await call.request.is_disconnected():
                break
            await asyncio.wait({caller.claims}, timeout=min(left, _CHECK_EVERY))
            if not caller.claims.done():
                await _check_again(call, wanted.queues)
    except BaseException:
        lines.leave(caller)
        if not caller.claims.cancel() and caller.claims.exception() is None:
            await call.transport.settle([GiveBack(claim.receipt) for claim in caller.claims.result()])
        raise
    lines.leave(caller)
    return [] if caller.claims.cancel() else caller.claims.result()


async def _check_again(call: Call, queues: Sequence[str]) -> None:
    """Refuse a caller whose token was removed while it waits."""
    if call.state.settings.resolver is None:
        grant = await authorize.caller(call.state, call.request)
        if grant is None or not all(grant.allows(Role.CONSUME, queue) for queue in queues):
            raise Refuse(401, "Unauthorized", "the token was removed or has expired; get another one")


def claimed(claim: Claim) -> types.ClaimedMessage:
    message = claim.message
    assert message.id is not None
    return types.ClaimedMessage(
        receipt=receipt_text(claim),
        id=message.id,
        queue=message.queue,
        key=message.key,
        priority=message.priority,
        headers=dict(message.headers),
        deliveries=claim.deliveries,
        attempts=claim.attempts,
        created_at=claim.created_at,
        due_at=claim.due_at,
        leased_until=claim.leased_until,
        **body_fields(message.payload, message.headers.get(codec.CONTENT_TYPE)),
    )


async def extend(call: Call) -> types.Refused:
    """Let leases end `lease` seconds from now."""
    by_text = _receipts(call)
    stale = await call.state.streams.extend([r.receipt for r in by_text.values()], call.body.lease)
    return types.Refused(refused=[text for text, r in by_text.items() if r.receipt in stale])


async def ack(call: Call) -> types.Refused:
    """The messages were processed."""
    return await _settle(call, lambda r: Ack(r.receipt))


async def nack(call: Call) -> types.Refused:
    """Try the messages again after `delay`, or as the retry settings decide."""
    body: types.NackRequest = call.body
    with_policy = await queues_with_policy(call.transport) if body.delay is None else ()
    return await _settle(call, lambda r: nacked(r, body.delay, body.error, body.traceback, with_policy))


async def queues_with_policy(transport: Transport) -> frozenset[str]:
    """Queues that have their own retry policy. The database applies it, by the message's own row."""
    if Capability.SETTINGS not in transport.capabilities:
        return frozenset()
    return frozenset(found.queue for found in await transport.operations.settings() if found.retry is not None)


def nacked(
    receipt: ClaimReceipt,
    delay: float | None,
    error: str | None,
    traceback: str | None = None,
    with_policy: Collection[str] = (),
) -> Outcome:
    """A nack, or a reject when the default retry policy allows no further attempt."""
    if delay is None and receipt.queue not in with_policy:
        delay = DEFAULT_RETRY.decide(receipt.attempts + 1)
        if delay is None:
            return Reject(receipt.receipt, "retries used up", error, traceback=traceback)
    return Nack(receipt.receipt, delay, error, traceback)


async def reject(call: Call) -> types.Refused:
    """Never try the messages again; they are kept as FAILED."""
    body: types.RejectRequest = call.body
    return await _settle(call, lambda r: Reject(r.receipt, body.reason, body.error, traceback=body.traceback))


async def give_back(call: Call) -> types.Refused:
    """Return the messages unprocessed: they are due as before, and this delivery does not count."""
    return await _settle(call, lambda r: GiveBack(r.receipt))


async def _settle(call: Call, outcome: Callable[[ClaimReceipt], Outcome]) -> types.Refused:
    by_text = _receipts(call)
    stale = set(await call.transport.settle([outcome(receipt) for receipt in by_text.values()]))
    call.state.streams.settled(receipt.receipt for receipt in by_text.values())
    return types.Refused(refused=[text for text, r in by_text.items() if r.receipt in stale])


def _receipts(call: Call) -> dict[str, ClaimReceipt]:
    texts: Sequence[str] = call.body.receipts
    call.check_size(len(texts))
    by_text = {text: parse_receipt(text) for text in texts}
    for queue in {receipt.queue for receipt in by_text.values()}:
        call.need(queue)
    return by_text
