"""Dead letters: kept with reason and error, listed, retried and replayed by the command line."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from typer.testing import CliRunner

from millpond import Message, Reject, Unsupported
from millpond.cli.app import app
from millpond.control import Control
from millpond.message import State, replayed_id
from tests.rabbitmq.conftest import arrival


async def reject(transport: Any, body: bytes, reason: str, queue: str = "q") -> Any:
    await transport.publish([Message(queue=queue, payload=body, key="k", headers={"a": 1, "b": [1]})])
    claim = await arrival(transport, queue)
    assert await transport.settle([Reject(claim.receipt, reason=reason, error=f"why {reason}")]) == []
    return claim.receipt.id


async def test_listed_newest_first_again_and_again(transport: Any) -> None:
    ids = [await reject(transport, b"%d" % n, f"r{n}") for n in range(3)]
    control = Control(transport)
    for _ in range(2):  # looking takes nothing away
        rows = await control.messages("q")
        assert [row.id for row in rows] == ids[::-1]
    assert next((r.state, r.reason, r.error, r.attempts) for r in rows) == (State.FAILED, "r2", "why r2", 1)
    assert rows[0].headers == {"a": 1, "b": [1]} and rows[0].key == "k"


async def test_retry_publishes_again_and_takes_out(transport: Any) -> None:
    kept, again = await reject(transport, b"1", "other"), await reject(transport, b"2", "chosen")
    control = Control(transport)
    retried = await control.retry_queue("q", reason="chosen")
    assert retried.published == [replayed_id(again, "retry")]
    claim = await arrival(transport)
    assert claim.message.payload == b"2" and claim.message.headers["replay-of"] == str(again)
    assert (claim.deliveries, claim.attempts) == (1, 0)
    assert [row.id for row in await control.messages("q")] == [kept]
    assert (await control.retry_queue("q", reason="chosen")).published == []


async def test_replay_into_another_queue(transport: Any) -> None:
    id_ = await reject(transport, b"1", "r")
    assert await Control(transport).replay_queue("q", name="monday", to="other") == [replayed_id(id_, "monday")]
    assert (await arrival(transport, "other")).message.payload == b"1"


async def test_what_a_broker_cannot_show_it_says(transport: Any) -> None:
    control = Control(transport)
    with pytest.raises(Unsupported, match="BROWSE"):
        await control.counts(["q"])
    with pytest.raises(Unsupported, match="queue"):
        await control.messages()
    with pytest.raises(Unsupported, match="PAUSE"):
        await control.pause("q")


async def test_by_the_command_line(transport: Any, rabbitmq_url: str) -> None:
    await reject(transport, b'"x"', "r")

    def run(*arguments: str) -> Any:
        return CliRunner().invoke(app, [*arguments, "--url", rabbitmq_url])

    listed = await asyncio.to_thread(run, "list", "q", "--json")
    assert listed.exit_code == 0, listed.output
    (row,) = json.loads(listed.stdout)["messages"]
    assert row["reason"] == "r"
    retried = await asyncio.to_thread(run, "retry", "--queue", "q", "--json")
    assert len(json.loads(retried.stdout)["published"]) == 1
    assert (await arrival(transport)).message.payload == b'"x"'
    id_ = await reject(transport, b"y", "r")
    replayed = await asyncio.to_thread(run, "replay", "--queue", "q", "--name", "monday", "--to", "other", "--json")
    assert json.loads(replayed.stdout)["published"] == [str(replayed_id(id_, "monday"))], replayed.output
    assert (await arrival(transport, "other")).message.payload == b"y"
