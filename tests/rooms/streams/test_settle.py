"""A task records the outcomes of a DataFrame, on two shards."""

from __future__ import annotations

import asyncio
from decimal import Decimal
from pathlib import Path
from typing import Any
from uuid import uuid4

import pyarrow as pa
import pytest

import millpond
from millpond import Message, State
from millpond.errors import InvalidOption
from millpond.spark.options import SparkOptions
from millpond.spark.settle import _Recorder
from tests.rooms.streams.driver import Driver

SHARDS = 2


async def hold(url: str) -> list[str]:
    """Three messages that the stream `s` has claimed."""
    store: Any = await millpond.connect(url)
    ids = [p.id for p in await store.publish([Message(queue="q", payload=b"x") for _ in range(3)])]
    await (await Driver(store).open()).held(1)
    await store.close()
    return [str(id_) for id_ in ids]


async def acked(url: str) -> dict[str, Any]:
    store: Any = await millpond.connect(url)
    await (await Driver(store).open()).ack(1, unsettled="ack")
    rows = [*await store.operations.browse("q"), *await store.operations.archived("q")]
    await store.close()
    return {str(row.id): row for row in rows}


@pytest.fixture
def urls(tmp_path: Path) -> list[str]:
    return [f"sqlite:///{tmp_path / str(n)}.db" for n in range(SHARDS)]


def record(urls: list[str], **columns: Any) -> tuple[int, list[str]]:
    shards = SparkOptions({"url": " ".join(urls)}, (), of="a test").shards()
    batch = pa.table(columns).to_batches()
    (answer,) = [batch.to_pylist()[0] for batch in _Recorder(shards, "s")(batch)]
    return answer["recorded"], answer["unknown"]


@pytest.mark.parametrize("told", [True, False])
def test_each_finds_its_shard_told_or_not(urls: list[str], told: bool) -> None:
    ids = [asyncio.run(hold(url)) for url in urls]
    stranger = str(uuid4())
    columns: dict[str, Any] = {
        "id": [ids[1][0], ids[0][0], stranger, ids[1][1]],
        "outcome": ["reject", "nack", "ack", "nack"],
        "delay": [None, Decimal("60.5"), None, None],
        "reason": ["no", None, None, "later"],
    }
    if told:
        columns["shard"] = [1, 0, 0, 1]
    assert record(urls, **columns) == (3, [stranger])
    first, second = (asyncio.run(acked(url)) for url in urls)
    assert first[ids[0][0]].state is State.RETRYABLE
    assert first[ids[0][0]].due_us - first[ids[0][0]].last_attempt_us == 60_500_000
    assert (second[ids[1][0]].state, second[ids[1][0]].reason) == (State.FAILED, "no")
    assert (second[ids[1][1]].state, second[ids[1][1]].error) == (State.RETRYABLE, "later")
    assert second[ids[1][2]].state is State.COMPLETED


def test_what_is_no_outcome_is_refused(urls: list[str]) -> None:
    ids = [asyncio.run(hold(url)) for url in urls]
    with pytest.raises(InvalidOption, match="ack, nack or reject, not 'done'"):
        record(urls, id=ids[0], outcome=["ack", "done", None])
    assert {row.state for row in asyncio.run(acked(urls[0])).values()} == {State.COMPLETED}
