"""Messages: defaults, ids, headers and error texts. (The conformance suite tests which messages publish refuses.)"""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from uuid import UUID

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from millpond import Claim, Message, Receipt, id_from
from millpond.errors import InvalidMessage
from millpond.message import (
    ERROR_LIMIT,
    HEADERS_DEPTH,
    check_id,
    decode_headers,
    decode_untrusted_headers,
    draft,
    encode_headers,
    id_of,
    new_id,
    replayed_id,
    short_error,
)


def test_values_are_frozen() -> None:
    with pytest.raises(AttributeError):
        Message(queue="q", payload=b"").queue = "x"  # type: ignore[misc]


def test_a_draft_has_its_times_as_numbers() -> None:
    due = datetime(1970, 1, 1, 1, tzinfo=UTC)
    d = draft(Message(queue="q", payload=b"", due_at=due, expires=due + timedelta(hours=1)))
    assert (d.due_us, d.delay_us, d.expires_us, d.expires_after_us) == (3_600_000_000, 0, 7_200_000_000, None)
    d = draft(Message(queue="q", payload=b"", delay=1.5, expires=timedelta(seconds=2)))
    assert (d.due_us, d.delay_us, d.expires_us, d.expires_after_us) == (None, 1_500_000, None, 2_000_000)


def test_a_draft_knows_who_made_its_id() -> None:
    given_id = new_id()
    assert draft(Message(queue="q", payload=b"", id=given_id)).given
    made = draft(Message(queue="q", payload=b""))
    assert not made.given and made.id.version == 7


def test_ids_of_one_process_sort_in_the_order_they_were_made() -> None:
    ids = [new_id() for _ in range(10_000)]
    assert ids == sorted(set(ids))


def test_ids_are_ordinary_uuids() -> None:
    id_ = new_id()
    same = UUID(str(id_))
    assert id_ == same and hash(id_) == hash(same) and repr(id_) == repr(same) and id_.is_safe is same.is_safe
    assert id_of(id_.bytes) == id_ == pickle.loads(pickle.dumps(id_)) == copy.deepcopy(id_)  # noqa: S301
    assert msgspec.json.decode(msgspec.json.encode(id_), type=UUID) == id_


@given(st.uuids())
def test_any_16_bytes_are_an_id(id_: UUID) -> None:
    assert id_of(id_.bytes) == id_


def test_stable_ids() -> None:
    assert id_from("order-7") == id_from("order-7") != id_from("order-8")
    original = new_id()
    assert replayed_id(original, "monday") == replayed_id(original, "monday")
    assert len({original, replayed_id(original, "monday"), replayed_id(original, "tuesday")}) == 3


def test_an_id_may_be_text() -> None:
    id_ = new_id()
    assert check_id(str(id_)) == check_id(id_.hex) == check_id(id_) == id_
    for bad in ("", "x", 7, None, b"x" * 16):
        with pytest.raises(InvalidMessage, match="id_from"):
            check_id(bad)


texts = st.text('aé🦆\0\n"\\ ', max_size=8)
json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=8,
)


@given(st.dictionaries(texts, json_values, max_size=4))
def test_headers_survive(headers: dict[str, object]) -> None:
    assert decode_headers(encode_headers(headers)) == headers


@pytest.mark.parametrize("encode", [str, str.encode])
def test_headers_of_other_programs_are_checked(encode: Callable[[str], str | bytes]) -> None:
    """Also those that SQLite has as bytes."""
    inner = HEADERS_DEPTH - 1
    deepest = encode('{"a":' + "[" * inner + "]" * inner + "}")
    assert decode_untrusted_headers(deepest) == msgspec.json.decode(deepest)
    many = encode('{"a":[' + "{}," * 1000 + "{}]}")
    assert len(decode_untrusted_headers(many)["a"]) == 1001
    for text in ('{"a":[' + "[" * inner + "]" * inner + "]}", "[]", "{", '{"a":' + "[" * 9000 + "]" * 9000 + "}"):
        with pytest.raises((msgspec.DecodeError, RecursionError)):
            decode_untrusted_headers(encode(text))


def test_no_headers_are_nothing() -> None:
    assert encode_headers({}) is None and decode_headers(None) == {} and decode_headers("") == {}


@given(st.text(max_size=20_000))
def test_any_error_becomes_storable(error: str) -> None:
    kept = short_error(error)
    assert kept is not None and len(kept.encode()) <= ERROR_LIMIT and "\0" not in kept


def test_a_long_error_is_cut_between_characters() -> None:
    """The limit counts bytes: databases and drivers limit bytes."""
    for text in ("x" * 10_000, "é" * 5_000, "失" * 3_000, "💥" * 2_500, "xé失💥" * 1_000):
        kept = short_error(text)
        assert kept is not None and kept.endswith("…") and text.startswith(kept[:-1])
        assert ERROR_LIMIT - 4 < len(kept.encode()) <= ERROR_LIMIT


def test_most_errors_stay_as_they_are() -> None:
    assert short_error(None) is None
    for text in ("", "plain", "ünï 🦆", "x" * ERROR_LIMIT):
        assert short_error(text) == text


def test_a_claim_as_people_see_it() -> None:
    claim = Claim(Message(queue="q", payload=b""), Receipt(new_id(), 1), 4, 1, 0, 1_000_000, 2_000_000, 32_000_000)
    assert (claim.crashes, claim.suspect, claim.redelivered) == (0, False, True)
    epoch = datetime(1970, 1, 1, tzinfo=UTC)
    assert [claim.created_at, claim.due_at, claim.claimed_at, claim.leased_until] == [
        epoch + timedelta(seconds=s) for s in (0, 1, 2, 32)
    ]
