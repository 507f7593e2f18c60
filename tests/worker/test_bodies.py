"""Bodies are decoded by the handler's annotation; a body that cannot be decoded is FAILED alone."""

import dataclasses
import logging
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any, TypedDict
from uuid import UUID

import msgspec
import pydantic
import pytest

from millpond import Millpond, State
from tests.worker.conftest import became, counts, on


class StructOrder(msgspec.Struct):
    sku: int
    at: datetime | None = None


class ModelOrder(pydantic.BaseModel):
    sku: int = pydantic.Field(ge=1)


@dataclasses.dataclass
class DataOrder:
    sku: int
    lines: list[ModelOrder] = dataclasses.field(default_factory=list)


class TypedOrder(TypedDict):
    sku: int


def annotated(kind: Any, got: list[Any]) -> Callable[..., Any]:
    async def handle(body: Any) -> None:
        got.append(body)

    handle.__annotations__["body"] = kind
    return handle


NOW = datetime(2026, 1, 2, tzinfo=UTC)
ID = UUID("018f0000-0000-7000-8000-000000000000")


@on("memory")
@pytest.mark.parametrize(
    ("kind", "sent", "received"),
    [
        (StructOrder, StructOrder(7, NOW), StructOrder(7, NOW)),
        (StructOrder, {"sku": 7}, StructOrder(7)),
        (StructOrder, b'{"sku": 7}', StructOrder(7)),
        (StructOrder, '{"sku": 7}', StructOrder(7)),
        (ModelOrder, ModelOrder(sku=7), ModelOrder(sku=7)),
        (list[ModelOrder], [{"sku": 7}], [ModelOrder(sku=7)]),
        (list[ModelOrder], [ModelOrder(sku=7)], [ModelOrder(sku=7)]),
        (DataOrder, DataOrder(7, [ModelOrder(sku=8)]), DataOrder(7, [ModelOrder(sku=8)])),
        (ModelOrder | None, {"sku": 7}, ModelOrder(sku=7)),
        (DataOrder, DataOrder(7), DataOrder(7)),
        (DataOrder, {"sku": 7, "lines": [{"sku": 8}]}, DataOrder(7, [ModelOrder(sku=8)])),
        (TypedOrder, {"sku": 7}, {"sku": 7}),
        (dict, {"sku": [1, None, True]}, {"sku": [1, None, True]}),
        (dict[str, int], {"sku": 7}, {"sku": 7}),
        (list, [1, "a"], [1, "a"]),
        (list[int], [1, 2], [1, 2]),
        (int, 7, 7),
        (UUID, str(ID).join('""'), ID),
        (datetime, NOW, NOW),
        (type(None), None, None),
        (str, "tea", "tea"),
        (str, b"tea", "tea"),
        (str, {"sku": 7}, '{"sku":7}'),
        (bytes, b"\x00\xff", b"\x00\xff"),
        (bytes, "tea", b"tea"),
        (bytes, {"sku": 7}, b'{"sku":7}'),
        (Any, {"sku": 7}, {"sku": 7}),
        (Any, "tea", "tea"),
        (Any, b"\x00\xff", b"\x00\xff"),
        (object, 7, 7),
    ],
)
async def test_bodies(pond: Millpond, kind: Any, sent: Any, received: Any) -> None:
    got: list[Any] = []
    pond.subscriber("q")(annotated(kind, got))
    id_ = await pond.publish("q", sent)
    await pond.run(until_idle=True, signals=False)
    assert got == [received]
    await became(pond, id_, State.COMPLETED)


@on("memory")
@pytest.mark.parametrize(
    ("kind", "sent"),
    [
        (StructOrder, {"sku": "seven"}),
        (StructOrder, b"{"),
        (StructOrder, b"\xff"),
        (ModelOrder, {"sku": 0}),
        (ModelOrder, b"no json"),
        (list[ModelOrder], [{"sku": 0}]),
        (DataOrder, {}),
        (TypedOrder, []),
        (dict, [1]),
        (int, "seven"),
        (str, b"\xff\xfe"),
        (Any, None),
    ],
)
async def test_a_body_that_does_not_decode_is_failed_with_the_reason(
    pond: Millpond, kind: Any, sent: Any, caplog: pytest.LogCaptureFixture
) -> None:
    got: list[Any] = []
    pond.subscriber("q")(annotated(kind, got))
    if kind is Any:  # declared as JSON, but it is not
        id_ = await pond.publish("q", b"{", headers={"content-type": None})
    else:
        id_ = await pond.publish("q", sent)
    with caplog.at_level(logging.DEBUG):
        await pond.run(until_idle=True, signals=False)
    row = await became(pond, id_, State.FAILED)
    assert got == []
    assert (row.reason, row.attempts, row.deliveries) == ("undecodable body", 1, 1)
    assert row.error
    assert "seven" not in caplog.text, "bodies must not be logged"


async def test_one_bad_body_does_not_harm_its_neighbours(pond: Millpond) -> None:
    """One undecodable payload must not abort a batch that was claimed with it."""
    got = []

    @pond.subscriber("q")
    async def handle(order: StructOrder) -> None:
        got.append(order.sku)

    await pond.publish_many("q", [{"sku": n} if n != 3 else {"sku": "bad"} for n in range(6)])
    await pond.run(until_idle=True, signals=False)
    assert sorted(got) == [0, 1, 2, 4, 5]
    assert await counts(pond) == {State.COMPLETED: 5, State.FAILED: 1}


@on("memory")
async def test_one_bad_body_in_a_batch_is_taken_out_of_it(pond: Millpond) -> None:
    got: list[list[int]] = []

    @pond.subscriber("q", batch=10)
    async def handle(orders: list[StructOrder]) -> None:
        got.append([order.sku for order in orders])

    await pond.publish_many("q", [{"sku": n} if n != 3 else {"sku": "bad"} for n in range(6)])
    await pond.run(until_idle=True, signals=False)
    assert got == [[0, 1, 2, 4, 5]]
    assert await counts(pond) == {State.COMPLETED: 5, State.FAILED: 1}


@on("memory")
@pytest.mark.parametrize("kind", [str, Any])
async def test_plain_text_of_other_publishers(pond: Millpond, kind: Any) -> None:
    got: list[Any] = []
    pond.subscriber("q")(annotated(kind, got))
    await pond.publish("q", b"it's text", headers={"content-type": "text/plain"})
    await pond.run(until_idle=True, signals=False)
    assert got == ["it's text"]


@on("memory")
@pytest.mark.parametrize("kind", [str, Any])
async def test_text_of_another_charset_is_taken_as_bytes_only(pond: Millpond, kind: Any) -> None:
    got: list[Any] = []
    pond.subscriber("q")(annotated(kind, got))
    pond.subscriber("bytes")(annotated(bytes, got))
    for queue in ("q", "bytes"):
        await pond.publish(queue, b"\xfc", headers={"content-type": "text/plain; charset=latin1"})
    await pond.run(until_idle=True, signals=False)
    assert got == [b"\xfc"]
    (row,) = await (await pond.transport).operations.archived("q")
    assert row.error and "text in 'latin1', not in UTF-8" in row.error
