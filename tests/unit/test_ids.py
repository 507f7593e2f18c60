"""Ids from names and numbers of callers, and ids that a publish returns."""

from __future__ import annotations

import copy
import pickle
import uuid
from datetime import UTC, date, datetime, timedelta, timezone
from typing import Any
from uuid import UUID

import msgspec
import pytest

from millpond import PublishedId, id_from
from millpond.errors import InvalidMessage
from millpond.ids import published_id

ORDER = UUID("0190a0b0-0000-7000-8000-000000000007")
NOON = datetime(2030, 1, 31, 12, tzinfo=UTC)


@pytest.mark.parametrize(
    ("parts", "id_"),
    [
        (("order-7",), "2adbff5c-4785-52aa-9ec9-6cbeb0034136"),
        ((7,), "fb43b250-b39e-5b7a-9db7-3381af9c2cce"),
        (("invoice", 7), "21d1be8a-4366-5286-bdcb-659e5d958952"),
        ((b"7",), "ad9c7f42-2a2c-55c8-b8ff-90bd9b171e2f"),
        ((date(2030, 1, 31),), "e129a65b-554c-5fbc-9413-a515d51eb945"),
    ],
)
def test_ids_never_change(parts: tuple[Any, ...], id_: str) -> None:
    """Messages are deduplicated by them, over versions of Millpond and over processes."""
    assert str(id_from(*parts)) == id_


def test_a_text_is_a_name_in_our_namespace() -> None:
    """Other languages can compute the same id."""
    assert id_from("order-7") == uuid.uuid5(UUID("6d696c6c-706f-5e64-8000-000000000000"), "order-7")


def test_a_uuid_is_itself() -> None:
    assert id_from(ORDER) is ORDER


def test_other_values_are_other_ids() -> None:
    values: list[tuple[Any, ...]] = [
        ("7",),
        (7,),
        (-7,),
        (b"7",),
        ("a", "b"),
        ("ab",),
        ("a", "b", ""),
        ("b", "a"),
        ("a", 7),
        ("a", "7"),
        ("a", ORDER),
        ("a", str(ORDER)),
        (date(2030, 1, 31),),
        ("2030-01-31",),
        (NOON,),
        (NOON + timedelta(microseconds=1),),
    ]
    assert len({id_from(*value) for value in values}) == len(values)


def test_one_moment_is_one_id() -> None:
    assert id_from(NOON) == id_from(NOON.astimezone(timezone(timedelta(hours=5))))


@pytest.mark.parametrize("value", [None, True, 7.0, datetime(2030, 1, 31), ["a"], object()])
def test_values_without_a_stable_text_are_refused(value: Any) -> None:
    with pytest.raises(InvalidMessage, match="id_from takes text, integers"):
        id_from(value)
    with pytest.raises(InvalidMessage, match="id_from takes text, integers"):
        id_from("order", value)


def test_no_text() -> None:
    with pytest.raises(InvalidMessage, match="surrogate"):
        id_from("\ud800")
    with pytest.raises(InvalidMessage, match="needs a name"):
        id_from()


@pytest.mark.parametrize("new", [True, False])
def test_a_published_id_is_a_uuid(new: bool) -> None:
    id_ = published_id(ORDER, new)
    assert isinstance(id_, UUID) and id_ == ORDER and {ORDER: 1}[id_] and hash(id_) == hash(ORDER)
    assert (str(id_), id_.bytes, id_.hex, id_.version) == (str(ORDER), ORDER.bytes, ORDER.hex, 7)
    assert msgspec.json.encode({"id": id_}) == msgspec.json.encode({"id": ORDER})
    for same in (id_, pickle.loads(pickle.dumps(id_)), copy.copy(id_), copy.deepcopy(id_)):  # noqa: S301 - our own
        assert (type(same), same, same.new) == (PublishedId, ORDER, new)
