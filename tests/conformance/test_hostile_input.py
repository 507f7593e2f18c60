"""Hostile or mistaken names, bodies and options: each works or raises one clear error; none is half-written."""

from __future__ import annotations

import itertools
import json
from datetime import datetime
from typing import Any
from uuid import uuid4

import pytest

from millpond import Ack, Capability, MillpondError, Nack, Receipt, Reject, State, Transport
from millpond.errors import (
    BodyNotEncodable,
    BodyTooLarge,
    InvalidMessage,
    InvalidOption,
    InvalidPriority,
    InvalidQueue,
    InvalidTime,
)
from millpond.message import BODY_LIMIT, HEADERS_DEPTH, HEADERS_LIMIT, NAME_LIMIT
from tests.conformance.backends import requires
from tests.conformance.conftest import Connect
from tests.conformance.messages import bodies, claim_one, counts, message, publish, row

pytestmark = pytest.mark.slow_on_servers

NAMES = {
    "single quote": "it's",
    "double quote": 'say "q"',
    "backtick": "`q`",
    "backslash": "a\\b\\",
    "injection": "q'; DROP TABLE millpond_message; --",
    "comment": "q -- /* comment */ #",
    "placeholders": ":name $1 ? %s %(name)s {ids}",
    "percent": "100%",
    "emoji": "🦆" * 20,
    "four-byte letters": "𝄞𐍈",
    "right to left": "\u202eسوق العمل",
    "combining": "e\u0301 vs é",
    "inner spaces": "a  b\tc\nd",
    "brackets": "[q]<q>(q)",
    "slash and dot": "../../etc/passwd",
    "unit separator": "a\x1fb\x7fc",
    "zero width": "a\u200bb",
    "longest": "x" * NAME_LIMIT,
    "longest in four-byte letters": "𝄞" * NAME_LIMIT,
}


async def test_any_text_is_a_queue_name_and_a_key(transport: Transport, subtests: pytest.Subtests) -> None:
    """Names are data, never part of a statement."""
    for which, name in NAMES.items():
        with subtests.test(name=which):
            id_ = await publish(transport, b"here", name, key=name, headers={name: name})
            await publish(transport, b"elsewhere", "q")
            claim = await claim_one(transport, name)
            assert (claim.message.id, claim.message.queue, claim.message.key) == (id_, name, name)
            assert claim.message.headers == {name: name}
            await transport.settle([Nack(claim.receipt, error=name)])
            claim = await claim_one(transport, name)
            assert await transport.settle([Reject(claim.receipt, reason=name, error=name)]) == []
            assert await bodies(transport) == [b"elsewhere"]


@requires(Capability.BROWSE | Capability.ARCHIVE | Capability.PAUSE)
async def test_operators_may_use_any_name(transport: Transport, subtests: pytest.Subtests) -> None:
    for which, name in NAMES.items():
        with subtests.test(name=which):
            id_ = await publish(transport, b"here", name, key=name)
            await publish(transport, b"elsewhere", "q")
            assert [r.id for r in await transport.operations.browse(name, key=name)] == [id_]
            assert await counts(transport, name) == {State.PENDING: 1}
            await transport.operations.pause(name)
            assert await transport.claim([name]) == []
            await transport.operations.resume(name)
            assert await transport.operations.cancel([id_], reason=name) == [id_]
            (archived,) = await transport.operations.archived(name)
            assert (archived.id, archived.queue, archived.key, archived.reason) == (id_, name, name, name)
            await transport.operations.retain(name, completed=0, failed=0)
            assert await transport.operations.purge(name) == 1
            assert await bodies(transport) == [b"elsewhere"]


@pytest.mark.parametrize(
    ("one", "two"),
    [("q", "Q"), ("straße", "strasse"), ("é", "e\u0301"), ("a", "á"), ("a b", "a  b"), ("a", "a\u200b"), ("🦆", "🦢")],
)
async def test_names_that_look_alike_are_different_queues(transport: Transport, one: str, two: str) -> None:
    """The collation of a database must not treat them as equal."""
    await publish(transport, b"1", one, key=one)
    await publish(transport, b"2", two, key=two)
    assert await bodies(transport, [one]) == [b"1"]
    assert await bodies(transport, [two]) == [b"2"]


@requires(Capability.PAUSE)
async def test_a_pause_hits_no_name_that_looks_alike(transport: Transport) -> None:
    await publish(transport, b"big", "Q")
    await publish(transport, b"accent", "é")
    await transport.operations.pause("q")
    await transport.operations.pause("e")
    assert await bodies(transport, ["Q"]) == [b"big"]
    assert await bodies(transport, ["é"]) == [b"accent"]


BAD_NAMES = {
    "empty": "",
    "space": " ",
    "leading space": " q",
    "trailing space": "q ",
    "trailing newline": "q\n",
    "trailing no-break space": "q\u00a0",
    "NUL": "a\0b",
    "too long": "x" * (NAME_LIMIT + 1),
    "10 kB": "x" * 10_240,
    "half a pair": "a\ud800",
    "bytes": b"q",
    "None": None,
    "number": 7,
}


async def test_names_that_no_database_could_keep_are_refused(transport: Transport, subtests: pytest.Subtests) -> None:
    for which, name in BAD_NAMES.items():
        with subtests.test(name=which):
            with pytest.raises(InvalidQueue) as error:
                await transport.publish([message(), message(queue=name)])
            assert len(str(error.value)) < 300
            with pytest.raises(InvalidQueue):
                await transport.claim(["q", name])
            with pytest.raises(InvalidQueue):
                await transport.wait([name], 0)
            if Capability.PAUSE in transport.capabilities:
                with pytest.raises(InvalidQueue):
                    await transport.operations.pause(name)
            assert await transport.claim(["q"]) == []


BAD_KEYS: list[Any] = ["NUL \0", "half \ud800", "x" * (NAME_LIMIT + 1), 7, b"k"]


async def test_keys_that_no_database_could_keep_are_refused(transport: Transport, subtests: pytest.Subtests) -> None:
    for key in BAD_KEYS:
        with subtests.test(key=repr(key)[:20]):
            with pytest.raises(InvalidMessage):
                await transport.publish([message(), message(key=key)])
            assert await transport.claim(["q"]) == []


async def test_white_space_in_keys_is_kept(transport: Transport, subtests: pytest.Subtests) -> None:
    for key in ("", " ", " k ", "k "):
        with subtests.test(key=key):
            await publish(transport, key=key)
            assert (await claim_one(transport)).message.key == key


# --- bodies and headers -----------------------------------------------------------------------------------

BODIES = {
    "nothing": b"",
    "NUL": b"\0",
    "every byte": bytes(range(256)) * 4,
    "not UTF-8": b"\xff\xfe\xfa",
    "quotes": b"'\"`\\%s$1:x",
    "copy marks": b"\\N\t\\.\r\n",
    "the limit": bytes(BODY_LIMIT),
}


async def test_any_bytes_are_a_body(transport: Transport, subtests: pytest.Subtests) -> None:
    """NUL and large payloads, one message or a bulk load."""
    for (which, body), count in itertools.product(BODIES.items(), (1, 25)):
        with subtests.test(body=which, count=count):
            if len(body) > 10_000:
                count = min(count, 20)
            await transport.publish([message(body) for _ in range(count)])
            claims = await transport.claim(["q"], count)
            assert [claim.message.payload for claim in claims] == [body] * count
            assert await transport.settle([Ack(claim.receipt) for claim in claims]) == []


async def test_one_byte_more_than_the_limit(transport: Transport, connect: Connect) -> None:
    with pytest.raises(BodyTooLarge, match="body_limit"):
        await transport.publish([message(bytes(BODY_LIMIT + 1))])
    assert await transport.claim(["q"]) == []


async def test_the_limit_is_an_option(connect: Connect) -> None:
    transport = await connect(body_limit=10)
    await publish(transport, bytes(10))
    with pytest.raises(BodyTooLarge):
        await transport.publish([message(bytes(11))])


NO_BODIES: list[Any] = ["text", None, 7, {"a": 1}, [b"x"]]


async def test_a_body_is_bytes(transport: Transport, subtests: pytest.Subtests) -> None:
    for body in NO_BODIES:
        with subtests.test(body=repr(body)):
            with pytest.raises(BodyNotEncodable):
                await transport.publish([message(b"good"), message(body)])
            assert await transport.claim(["q"]) == []


@pytest.mark.parametrize("body", [bytearray(b"\0x"), memoryview(b"\0x")])
async def test_what_is_like_bytes_is_a_body(transport: Transport, body: Any) -> None:
    await publish(transport, body)
    assert await bodies(transport) == [b"\0x"]


HEADERS: list[dict[str, Any]] = [
    {"NUL": "a\0b"},
    {"": ""},
    {"ünï🦆": "🦆" * 100},
    {"n": 2**62, "f": 0.1, "b": False, "z": None},
    {"d": {"e": [{}]}},
    {"n": 10**30, "in": [-(10**4000)]},
    {"deep": json.loads("[" * (HEADERS_DEPTH - 1) + "]" * (HEADERS_DEPTH - 1)), "brackets": "[" * 100},
]


async def test_any_json_is_a_header(transport: Transport, subtests: pytest.Subtests) -> None:
    for headers in HEADERS:
        with subtests.test(headers=str(headers)[:40]):
            await publish(transport, headers=headers)
            assert (await claim_one(transport)).message.headers == headers


NO_HEADERS: list[tuple[Any, type[MillpondError]]] = [
    ({7: "x"}, InvalidMessage),
    ({"x": object()}, BodyNotEncodable),
    ({"x": {1j}}, BodyNotEncodable),
    ({"x": "\ud800"}, BodyNotEncodable),
    ({"x": "y" * HEADERS_LIMIT}, BodyTooLarge),
    ({"x": 10**5000}, BodyNotEncodable),
    ({"x": json.loads("[" * HEADERS_DEPTH + "]" * HEADERS_DEPTH)}, BodyNotEncodable),
    ("text", InvalidMessage),
    ([("a", "b")], InvalidMessage),
]


async def test_headers_that_are_not_json_are_refused(transport: Transport, subtests: pytest.Subtests) -> None:
    for headers, error in NO_HEADERS:
        with subtests.test(headers=repr(type(headers)), error=error.__name__):
            with pytest.raises(error):
                await transport.publish([message(), message(headers=headers)])
            assert await transport.claim(["q"]) == []


async def test_endless_headers_are_refused(transport: Transport) -> None:
    endless: dict[str, Any] = {}
    endless["self"] = endless
    with pytest.raises(BodyNotEncodable):
        await transport.publish([message(headers=endless)])


# --- fields -----------------------------------------------------------------------------------------------


BAD_PRIORITIES: list[Any] = [-1, 101, 1.5, "1", None, True, 10**30]


async def test_priority_out_of_range(transport: Transport, subtests: pytest.Subtests) -> None:
    for priority in BAD_PRIORITIES:
        with subtests.test(priority=repr(priority)[:20]):
            with pytest.raises(InvalidPriority):
                await transport.publish([message(), message(priority=priority)])
            assert await transport.claim(["q"]) == []


BAD_TIMES: list[tuple[str, Any]] = [
    ("due_at", datetime(2026, 1, 1)),
    ("expires", datetime(2026, 1, 1)),
    ("due_at", "2026-01-01"),
    ("due_at", 1_700_000_000),
    ("delay", -1),
    ("delay", -0.000001),
    ("delay", float("nan")),
    ("delay", float("inf")),
    ("delay", 1e300),
    ("delay", 10**400),
    ("expires", -1),
    ("expires", float("nan")),
]


async def test_times_that_are_none(transport: Transport, subtests: pytest.Subtests) -> None:
    """Naive, negative, infinite and unreadable times are refused."""
    for field, value in BAD_TIMES:
        with subtests.test(field=field, value=repr(value)[:20]):
            with pytest.raises(InvalidTime):
                await transport.publish([message(), message(**{field: value})])
            assert await transport.claim(["q"]) == []


async def test_durations_of_the_wrong_type(transport: Transport, subtests: pytest.Subtests) -> None:
    for field, value in (("delay", "5"), ("delay", True), ("expires", "soon")):
        with subtests.test(field=field, value=value):
            with pytest.raises(InvalidOption):
                await transport.publish([message(), message(**{field: value})])
            assert await transport.claim(["q"]) == []


BAD_IDS: list[Any] = ["not-a-uuid", "", 7, b"x" * 16, "'; --"]


async def test_an_id_that_is_none(transport: Transport, subtests: pytest.Subtests) -> None:
    """A bad id is refused."""
    for id_ in BAD_IDS:
        with subtests.test(id=repr(id_)):
            with pytest.raises(InvalidMessage, match="id_from"):
                await transport.publish([message(), message(id=id_)])
            assert await transport.claim(["q"]) == []


@requires(Capability.CLAIM_BY_ID | Capability.BROWSE | Capability.RESCHEDULE | Capability.ARCHIVE)
async def test_an_id_that_is_none_for_the_other_verbs(transport: Transport) -> None:
    bad: Any = ["nonsense"]
    for call in (
        lambda: transport.claim(["q"], ids=bad),
        lambda: transport.operations.find(bad),
        lambda: transport.operations.cancel(bad),
        lambda: transport.operations.reschedule(bad, delay=1),
        lambda: transport.operations.replay(bad, name="again"),
    ):
        with pytest.raises(InvalidMessage):
            await call()


async def test_something_that_is_no_message(transport: Transport) -> None:
    for thing in ("text", b"bytes", {"queue": "q", "payload": b""}, None):
        with pytest.raises(InvalidMessage):
            await transport.publish([message(), thing])  # type: ignore[list-item]
    assert await transport.claim(["q"]) == []


async def test_receipts_from_elsewhere_are_stale(transport: Transport) -> None:
    await publish(transport)
    claim = await claim_one(transport)
    for token in (0, -1, 2**63 - 1, -(2**63), claim.receipt.token + 1):
        receipt = Receipt(claim.receipt.id, token)
        assert await transport.settle([Ack(receipt)]) == [receipt]
        assert await transport.extend([receipt]) == [receipt]
    assert await transport.settle([Ack(claim.receipt)]) == []


async def test_a_token_no_database_could_hold_is_stale(transport: Transport) -> None:
    receipt = Receipt(uuid4(), 2**80)
    assert await transport.settle([Ack(receipt)]) == [receipt]
    assert await transport.extend([receipt]) == [receipt]


BAD_OPTIONS: list[dict[str, Any]] = [
    *({"pol_size": 3}, {"body_limit": 0}, {"body_limit": "1 MiB"}, {"dedupe_for": -1}, {"dedupe_for": "week"}),
]


async def test_options_that_do_not_exist_or_make_no_sense(connect: Connect, subtests: pytest.Subtests) -> None:
    for options in BAD_OPTIONS:
        with subtests.test(**options), pytest.raises((InvalidOption, InvalidTime)):
            await connect(**options)


async def test_an_unknown_option_names_its_neighbour(connect: Connect) -> None:
    with pytest.raises(InvalidOption, match="body_limit"):
        await connect(bodylimit=7)


@requires(Capability.BROWSE)
async def test_one_hostile_row_never_blocks_its_neighbours(transport: Transport) -> None:
    sent = [p.id for p in await transport.publish([message(body) for body in list(BODIES.values())[:-1]])]
    claims = await transport.claim(["q"], 10)
    assert [claim.receipt.id for claim in claims] == sent
    errors = ["\0", "\ud800", "'", "\\", "🦆", "{}"]
    assert await transport.settle([Nack(c.receipt, error=e) for c, e in zip(claims, errors, strict=True)]) == []
    assert await counts(transport) == {State.RETRYABLE: 6}
    assert [(await row(transport, id_)).error for id_ in sent[2:]] == errors[2:]
