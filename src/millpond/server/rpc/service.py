"""The calls of `millpond.proto`."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from datetime import UTC
from typing import Any
from uuid import UUID

import grpc
import msgspec

from millpond import codec, errors
from millpond.clock import SECOND, monotonic
from millpond.errors import BodyNotEncodable, InvalidOption
from millpond.message import Claim, Message, Unique, check_id, check_name
from millpond.outcome import Ack, Outcome, Reject
from millpond.server.authorize import bearer, by_token, is_open
from millpond.server.grants import ANYONE, Grant, Role
from millpond.server.handlers.call import Refuse
from millpond.server.handlers.messages import nacked, publish_all, queues_with_policy
from millpond.server.limits import TooMany
from millpond.server.problems import public_text
from millpond.server.receipts import ClaimReceipt, parse_receipt, receipt_text
from millpond.server.rpc import wire
from millpond.server.rpc.settling import Settling
from millpond.server.rpc.streams import StreamSubscriber
from millpond.server.state import ServerState

log = logging.getLogger("millpond.server")

DEFAULT_MESSAGES, DEFAULT_BYTES, DEFAULT_LEASE = 100, 16 * 1024 * 1024, 30.0
_MOST_MESSAGES, _MOST_BYTES, _LONGEST_LEASE, _MOST_QUEUES = 10_000, 256 * 1024 * 1024, 43_200.0, 100
_BATCH, _BATCH_BYTES = 100, 512 * 1024
"""Messages of one reply of a stream, and bytes after which it is full."""
CHECK_EVERY = 1.0
"""Seconds after which the caller of a stream is checked again. Tokens are remembered for two."""
_CONTENT_TYPES = ("", "application/json", codec.TEXT, codec.BINARY)

# The first class that fits counts.
_CODES: tuple[tuple[type[Exception], grpc.StatusCode], ...] = (
    (errors.Unsupported, grpc.StatusCode.UNIMPLEMENTED),
    (errors.NotUnique, grpc.StatusCode.ALREADY_EXISTS),
    (errors.Closed, grpc.StatusCode.UNAVAILABLE),
    (errors.DataRefused, grpc.StatusCode.INVALID_ARGUMENT),
    (errors.StoreError, grpc.StatusCode.UNAVAILABLE),
    (errors.MillpondError, grpc.StatusCode.INVALID_ARGUMENT),
    (TooMany, grpc.StatusCode.RESOURCE_EXHAUSTED),
)
_End = Callable[..., tuple[grpc.StatusCode, str]]
"""Gets the code and text with which a call ends, and returns them."""
ROLES = {
    "Publish": Role.PUBLISH,
    "MessageStream": Role.CONSUME,
    "MessageAck": Role.CONSUME,
    "MessageNack": Role.CONSUME,
    "MessageReject": Role.CONSUME,
    "MessageExtend": Role.CONSUME,
}
"""Role that each method needs."""


class Service:
    """Answers calls with the transport of a server."""

    def __init__(self, state: ServerState) -> None:
        self._state = state
        self.streams = state.streams
        self._settling = Settling(state.transport)

    def handler(self) -> grpc.GenericRpcHandler:
        """All methods, each with its role and its errors."""
        calls: dict[str, Callable[..., Any]] = {
            "Publish": self._publish,
            "MessageAck": self._ack,
            "MessageNack": self._nack,
            "MessageReject": self._reject,
            "MessageExtend": self._extend,
        }
        handlers = {}
        for name, (request, reply, many) in wire.methods().items():
            make = grpc.unary_stream_rpc_method_handler if many else grpc.unary_unary_rpc_method_handler
            call = self._stream if many else self._unary(name, calls[name])
            handlers[name] = make(
                call, request_deserializer=request.FromString, response_serializer=reply.SerializeToString
            )
        return grpc.method_handlers_generic_handler(wire.SERVICE, handlers)

    def _unary(self, name: str, call: Callable[[Grant, Any], Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
        async def answer(request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> Any:
            with self._counted(name) as end:
                try:
                    with self._state.connections.one():
                        grant = await self._caller(name, context)
                        with self._state.connections.share(grant.name):
                            reply = await call(grant, request)
                except Exception as e:
                    await context.abort(*end(*_status(e)))
                end(grpc.StatusCode.OK)
                return reply

        return answer

    @contextlib.contextmanager
    def _counted(self, method: str) -> Iterator[_End]:
        """Count a call by its code: the one that `end` gets, or CANCELLED if the client leaves before."""
        codes = [grpc.StatusCode.CANCELLED]

        def end(code: grpc.StatusCode, text: str = "") -> tuple[grpc.StatusCode, str]:
            codes.append(code)
            return code, text

        try:
            yield end
        finally:
            self._state.metrics.add_call(method, codes[-1].name)

    async def _caller(self, method: str, context: grpc.aio.ServicerContext[Any, Any]) -> Grant:
        grant = await self._granted(method, context)
        self._state.rates.take(grant.name)
        return grant

    async def _granted(self, method: str, context: grpc.aio.ServicerContext[Any, Any]) -> Grant:
        state = self._state
        given = dict(context.invocation_metadata() or ())
        token = bearer(str(given.get("authorization", "")))
        grant: Grant | None = None
        if token is not None:
            grant = await by_token(state, token, context.peer().rpartition(":")[0])
        elif state.settings.resolver is None and await is_open(state, map(str, given)):
            grant = ANYONE
        if grant is None:
            raise Refuse(401, "Unauthorized", "send a token of this server: metadata authorization: Bearer mp_…")
        if not grant.has(ROLES[method]):
            raise Refuse(403, "Forbidden", f"this needs a token with the role {ROLES[method]}")
        return grant

    # --- publish ------------------------------------------------------------------------------------

    async def _publish(self, grant: Grant, request: Any) -> Any:
        _need(grant, Role.PUBLISH, check_name(request.queue, "queue"))
        self._check_size(len(request.messages))
        messages = [_message(request.queue, new) for new in request.messages]
        published = await publish_all(self._state.transport, messages, alone=len(messages) == 1)
        return wire.PublishResponse(
            published=[
                wire.Published(id=str(p.id), new=p.new, result="" if message.unique is None else p.result)
                for message, p in zip(messages, published, strict=True)
            ]
        )

    # --- stream -------------------------------------------------------------------------------------

    async def _stream(self, request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> AsyncIterator[Any]:
        subscriber: StreamSubscriber | None = None
        with self._counted("MessageStream") as end:
            try:
                with self._state.connections.one(), contextlib.ExitStack() as shares:
                    grant = await self._caller("MessageStream", context)
                    shares.enter_context(self._state.connections.share(grant.name))
                    subscriber = _subscriber(request)
                    _need_all(grant, subscriber.queues)
                    await self.streams.add(subscriber)
                    await context.send_initial_metadata(())
                    check_at = monotonic() + CHECK_EVERY
                    while (claims := await self._next(subscriber)) is not None:
                        if monotonic() >= check_at:
                            await self._check_again(context, subscriber)
                            check_at = monotonic() + CHECK_EVERY
                        if claims:
                            yield wire.MessageStreamResponse(messages=[_delivery(claim) for claim in claims])
                end(grpc.StatusCode.OK)
            except Exception as e:
                await context.abort(*end(*_status(e)))
            finally:
                if subscriber is not None:  # also when the client is gone
                    await asyncio.shield(asyncio.create_task(self.streams.remove(subscriber)))

    async def _check_again(self, context: grpc.aio.ServicerContext[Any, Any], subscriber: StreamSubscriber) -> None:
        """Refuse a subscriber whose token was removed. While the database is away, it has nothing new to send."""
        with contextlib.suppress(errors.StoreError):
            _need_all(await self._granted("MessageStream", context), subscriber.queues)

    async def _next(self, subscriber: StreamSubscriber) -> list[Claim] | None:
        """Messages to send; none if it is time to check the caller. None: the server stops."""
        stopping = asyncio.create_task(self._state.stopping.wait())
        more = asyncio.create_task(self.streams.next(subscriber, _BATCH, _BATCH_BYTES))
        try:
            await asyncio.wait({stopping, more}, timeout=CHECK_EVERY, return_when=asyncio.FIRST_COMPLETED)
            return more.result() if more.done() else None if stopping.done() else []
        finally:
            stopping.cancel()
            more.cancel()

    # --- settle -------------------------------------------------------------------------------------

    async def _ack(self, grant: Grant, request: Any) -> Any:
        return await self._settle(grant, request, lambda r: Ack(r.receipt))

    async def _nack(self, grant: Grant, request: Any) -> Any:
        delay = request.delay if request.HasField("delay") else None
        error, trace = request.error or None, request.traceback or None
        with_policy = await queues_with_policy(self._state.transport) if delay is None else ()
        return await self._settle(grant, request, lambda r: nacked(r, delay, error, trace, with_policy))

    async def _reject(self, grant: Grant, request: Any) -> Any:
        reason, error, trace = request.reason or "rejected", request.error or None, request.traceback or None
        return await self._settle(grant, request, lambda r: Reject(r.receipt, reason, error, traceback=trace))

    async def _settle(self, grant: Grant, request: Any, outcome: Callable[[ClaimReceipt], Outcome]) -> Any:
        by_text, unknown = self._receipts(grant, request)
        stale = await self._settling.settle([outcome(receipt) for receipt in by_text.values()])
        self.streams.settled(receipt.receipt for receipt in by_text.values())
        return wire.SettleResponse(refused=[*unknown, *(t for t, r in by_text.items() if r.receipt in stale)])

    async def _extend(self, grant: Grant, request: Any) -> Any:
        by_text, unknown = self._receipts(grant, request)
        lease = _bounded(request.lease or DEFAULT_LEASE, 1.0, _LONGEST_LEASE, "lease")
        stale = await self.streams.extend([receipt.receipt for receipt in by_text.values()], lease)
        return wire.SettleResponse(refused=[*unknown, *(t for t, r in by_text.items() if r.receipt in stale)])

    def _receipts(self, grant: Grant, request: Any) -> tuple[dict[str, ClaimReceipt], list[str]]:
        """Receipts by the text that the client sent, a receipt or an id, and the ids that no stream has sent."""
        self._check_size(len(request.receipts) + len(request.ids))
        by_text = {text: parse_receipt(text) for text in request.receipts}
        unknown: list[str] = []
        if request.ids:
            queue = check_name(request.queue, "queue")
            for text in request.ids:
                sent = self.streams.sent.get(check_id(text))
                if sent is None or sent.facts.queue != queue:
                    unknown.append(text)
                else:
                    by_text[text] = sent.facts
        _need_all(grant, list({receipt.queue for receipt in by_text.values()}))
        return by_text, unknown

    def _check_size(self, number: int) -> None:
        most = self._state.settings.limits.batch
        if number > most:
            raise InvalidOption(f"the request has {number:,} entries, the limit is {most:,}; send several")


def _need(grant: Grant, role: Role, queue: str) -> None:
    if not grant.allows(role, queue):
        raise Refuse(403, "Forbidden", f"your token gives no right to {role} queue {queue[:80]!r}")


def _need_all(grant: Grant, queues: Sequence[str]) -> None:
    for queue in queues:
        _need(grant, Role.CONSUME, queue)


def _subscriber(request: Any) -> StreamSubscriber:
    queues: Sequence[str] = [check_name(queue, "queue") for queue in request.queues]
    if not 1 <= len(queues) <= _MOST_QUEUES:
        raise InvalidOption(f"a stream has 1 to {_MOST_QUEUES} queues, not {len(queues)}")
    return StreamSubscriber(
        queues,
        max_messages=int(_bounded(request.max_messages or DEFAULT_MESSAGES, 1, _MOST_MESSAGES, "max_messages")),
        max_bytes=int(_bounded(request.max_bytes or DEFAULT_BYTES, 1, _MOST_BYTES, "max_bytes")),
        lease=_bounded(request.lease or DEFAULT_LEASE, 1.0, _LONGEST_LEASE, "lease"),
    )


def _bounded(value: float, least: float, most: float, what: str) -> float:
    if not least <= value <= most:
        raise InvalidOption(f"{what} must be from {least:g} to {most:g}, not {value:g}")
    return value


def _message(queue: str, new: Any) -> Message:
    headers: dict[str, Any] = dict(new.headers)
    if new.content_type not in _CONTENT_TYPES:
        raise InvalidOption(
            f"content_type must be one of {', '.join(_CONTENT_TYPES[1:])}, not {new.content_type[:80]!r}"
        )
    if new.content_type in (codec.TEXT, codec.BINARY):
        headers[codec.CONTENT_TYPE] = new.content_type
    else:
        try:
            msgspec.json.decode(new.body)
        except (ValueError, RecursionError, msgspec.MsgspecError) as e:
            raise BodyNotEncodable(f"the body is not JSON: {e}; set content_type for text or bytes") from None
    return Message(
        queue=queue,
        payload=new.body,
        id=UUID(str(check_id(new.id))) if new.id else None,
        key=new.key if new.HasField("key") else None,
        priority=new.priority if new.HasField("priority") else 50,
        delay=new.delay if new.HasField("delay") else None,
        due_at=new.due_at.ToDatetime(tzinfo=UTC) if new.HasField("due_at") else None,
        expires=new.expires if new.HasField("expires") else None,
        headers=headers,
        unique=_unique(new.unique) if new.HasField("unique") else None,
    )


def _unique(given: Any) -> Unique:
    if not given.value:
        raise InvalidOption("unique has no value")
    if given.unfinished and given.HasField("window"):
        raise InvalidOption("give either unfinished or window, not both")
    kinds = wire.message("Unique").DESCRIPTOR.enum_types_by_name["OnConflict"].values_by_number
    if given.on_conflict not in kinds:
        raise InvalidOption(f"on_conflict must be one of 0 to {max(kinds)}, not {given.on_conflict}")
    held: Any = "unfinished" if given.unfinished else given.window if given.HasField("window") else "waiting"
    return Unique(given.value, held, kinds[given.on_conflict].name.lower())


def _delivery(claim: Claim) -> Any:
    message = claim.message
    content_type = message.headers.get(codec.CONTENT_TYPE, "")
    headers = {name: value for name, value in message.headers.items() if name != codec.CONTENT_TYPE}
    return wire.Delivery(
        receipt=receipt_text(claim),
        id=str(message.id),
        queue=message.queue,
        key=message.key,
        priority=message.priority,
        body=message.payload,
        content_type=content_type if isinstance(content_type, str) else "",
        headers={name: v if isinstance(v, str) else msgspec.json.encode(v).decode() for name, v in headers.items()},
        deliveries=claim.deliveries,
        attempts=claim.attempts,
        created_at=_timestamp(claim.created_us),
        due_at=_timestamp(claim.due_us),
    )


def _timestamp(us: int) -> Any:
    return wire.Timestamp(seconds=us // SECOND, nanos=us % SECOND * 1000)


def _status(error: Exception) -> tuple[grpc.StatusCode, str]:
    """The code and text of an error for a client."""
    if isinstance(error, Refuse):
        code = grpc.StatusCode.UNAUTHENTICATED if error.status == 401 else grpc.StatusCode.PERMISSION_DENIED
        return code, str(error)
    for kind, code in _CODES:
        if isinstance(error, kind):
            return code, public_text(error)
    if isinstance(error, ValueError | OverflowError):
        return grpc.StatusCode.INVALID_ARGUMENT, f"the request has a value out of range: {error}"
    log.error("unexpected error: %s", type(error).__name__, exc_info=error)
    return grpc.StatusCode.INTERNAL, "an unexpected error; its text is in the server's log"
