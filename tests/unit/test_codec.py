"""Bodies to bytes and back."""

from __future__ import annotations

import dataclasses
from datetime import UTC, datetime
from typing import Any
from uuid import UUID

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from millpond.codec import BINARY, TEXT, decode, encode, is_text
from millpond.errors import BodyNotDecodable, BodyNotEncodable


@dataclasses.dataclass
class Order:
    sku: int


class Struct(msgspec.Struct):
    sku: int


class LikePydantic:
    def model_dump(self, mode: str) -> dict[str, Any]:
        assert mode == "json"
        return {"sku": 7}


@pytest.mark.parametrize(
    ("body", "payload", "content_type"),
    [
        (b"\0\xff", b"\0\xff", BINARY),
        (bytearray(b"x"), b"x", BINARY),
        (memoryview(b"x"), b"x", BINARY),
        ("ü🦆", "ü🦆".encode(), TEXT),
        ("", b"", TEXT),
        (None, b"null", None),
        ({"sku": 7}, b'{"sku":7}', None),
        ([1, 2.5, True], b"[1,2.5,true]", None),
        (Order(7), b'{"sku":7}', None),
        (Struct(7), b'{"sku":7}', None),
        (LikePydantic(), b'{"sku":7}', None),
        ([LikePydantic()], b'[{"sku":7}]', None),
        ({"of": LikePydantic()}, b'{"of":{"sku":7}}', None),
        (UUID(int=1), b'"00000000-0000-0000-0000-000000000001"', None),
        (datetime(2026, 1, 1, tzinfo=UTC), b'"2026-01-01T00:00:00Z"', None),
    ],
)
def test_encode(body: Any, payload: bytes, content_type: str | None) -> None:
    """Every type of body, its bytes and its content type."""
    assert encode(body) == (payload, content_type)


@pytest.mark.parametrize("body", [object(), [object()], 1j, {1j: 2}, lambda: None, "\ud800", {"x": "\ud800"}])
def test_what_cannot_be_a_body(body: Any) -> None:
    with pytest.raises(BodyNotEncodable):
        encode(body)


def test_an_endless_body_is_refused() -> None:
    endless: list[Any] = []
    endless.append(endless)
    with pytest.raises(BodyNotEncodable):
        encode(endless)


@given(st.binary() | st.text(st.characters(exclude_categories=["Cs"])) | st.lists(st.integers(-(2**53), 2**53)))
def test_round_trip(body: Any) -> None:
    assert decode(*encode(body)) == body


@pytest.mark.parametrize(("payload", "content_type"), [(b"{", None), (b"", None), (b"\xff", None), (b"\xff", TEXT)])
def test_what_is_not_what_it_says(payload: bytes, content_type: str | None) -> None:
    with pytest.raises(BodyNotDecodable):
        decode(payload, content_type)


@pytest.mark.parametrize(
    "content_type",
    [
        "text/plain",
        "Text/Plain",
        "text/plain;charset=UTF-8",
        'text/plain; charset="utf8"; format=flowed',
        "text/plain; charset=us-ascii",
    ],
)
def test_text_with_any_parameters(content_type: str) -> None:
    assert decode("it's ü".encode(), content_type) == "it's ü"


def test_text_of_another_charset_is_refused() -> None:
    with pytest.raises(BodyNotDecodable, match=r"^the body is text in 'iso-8859-1', not in UTF-8; take it as bytes"):
        decode(b"\xfc", "text/plain; charset=ISO-8859-1")


@pytest.mark.parametrize("content_type", [None, 7, [], "text/plainer", "text/html", "application/json"])
def test_other_types_are_no_text(content_type: Any) -> None:
    assert not is_text(content_type)


def test_reading_runs_no_code() -> None:
    with pytest.raises(BodyNotDecodable):
        decode(b"cos\nsystem\n(S'true'\ntR.", None)
