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
from millpond.message import State, new_id, replayed_id
from millpond.transports.rabbitmq.envelope import Envelope, Past
from millpond.transports.rabbitmq.names import dead_name
from millpond.transports.rabbitmq.publisher import Parcel
from tests.rabbitmq.conftest import SOON, arrival

DEAD = dead_name("q")


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


async def test_many_are_taken_out_once_and_not_for_each_page(transport: Any) -> None:
    letters = [
        Parcel(Envelope(new_id(), b"", {}, Past(queue="q", created_us=n, failed_us=n, reason=f"r{n % 2}")), aside=DEAD)
        for n in range(1, 2501)
    ]
    await transport.publisher.send(letters)
    control = Control(transport)
    store: Any = control.store
    taken, take = 0, store._take

    async def counted(*arguments: Any) -> Any:
        nonlocal taken
        taken += 1
        return await take(*arguments)

    store._take = counted
    assert len((await control.retry_queue("q", reason="r1")).published) == 1250
    assert taken == 2  # all pages, and again after the last, which put them back
    assert len(await transport.claim(["q"], 2000)) == 1250
    other, rest = Control(transport), list[Any]()
    async with asyncio.timeout(SOON):  # when nobody has asked for more, they are there for others again
        while len(rest) < 1250:
            rest = await other.messages("q", limit=2000)
    assert {row.reason for row in rest} == {"r0"} and len(rest) == 1250


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
    with pytest.raises(Unsupported, match=r"name of its queue.* BROWSE"):
        await control.retry([new_id()])
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
