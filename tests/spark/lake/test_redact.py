"""A function of the caller decides which bodies reach a lake. No JVM is needed."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from millpond import Ack, Message, connect
from millpond.cli import run_command
from tests.spark.lake.here import export, lake_rows


def without_cards(queue: str, body: bytes) -> bytes:
    order = json.loads(body)
    del order["card"]
    return json.dumps({**order, "queue": queue}).encode()


def no_bytes(queue: str, body: bytes) -> bytes:
    return None  # type: ignore[return-value]


def settle(url: str, bodies: list[bytes]) -> None:
    asyncio.run(_settle(url, bodies))


async def _settle(url: str, bodies: list[bytes]) -> None:
    store = await connect(url)
    await store.publish([Message(queue="orders", payload=body) for body in bodies])
    await store.settle([Ack(claim.receipt) for claim in await store.claim(["orders"], 100)])
    await store.close()


pytestmark = pytest.mark.usefixtures("soon")
CARD = b'{"sku": 7, "card": "4111111111111111"}'


def test_bodies_are_redacted_before_they_are_written_and_decoded(sqlite_url: str, tmp_path: Path) -> None:
    settle(sqlite_url, [CARD, b"no JSON 4111111111111111"])
    export(tmp_path / "lake", sqlite_url, redact=without_cards, decode="infer")
    rows = sorted(lake_rows(tmp_path / "lake"), key=lambda row: len(row["payload"]))
    assert [row["payload"] for row in rows] == [b"", b'{"sku": 7, "queue": "orders"}'], (
        "a failure empties its body only"
    )
    assert rows[1]["body"] == {"sku": 7, "queue": "orders"}
    assert not [file for file in (tmp_path / "lake").rglob("*") if file.is_file() and b"411111" in file.read_bytes()]


def test_a_function_that_returns_no_bytes_empties_the_body(sqlite_url: str, tmp_path: Path) -> None:
    settle(sqlite_url, [CARD])
    export(tmp_path / "lake", sqlite_url, redact=no_bytes)
    assert [row["payload"] for row in lake_rows(tmp_path / "lake")] == [b""]


@pytest.mark.parametrize("target", ["no_such_module:function", "json:no_such_function", "json:__name__", "json", ":x"])
def test_a_wrong_function_is_refused_before_spark_starts(
    target: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    url = f"sqlite:///{tmp_path}/x.db"
    assert run_command(["lake", "export", "--lake", str(tmp_path / "lake"), "--url", url, "--redact", target]) == 2
    assert "--redact" in capsys.readouterr().err
