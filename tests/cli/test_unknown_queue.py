"""Commands on a queue that does not exist: an error with the nearest name, and nothing is created.

`list` and `stats` print their empty result first, for programs that read it.
"""

import asyncio
from pathlib import Path

import pytest

from millpond import Message, connect
from millpond.cli.bridge import check_queues
from tests.cli.conftest import Cli, published

pytestmark = pytest.mark.slow_on_servers

COMMANDS = [
    ["pause"],
    ["resume"],
    ["retain", "--completed", "7d"],
    ["purge", "--older-than", "7d"],
    ["list"],
    ["stats"],
    ["stats", "orders"],
    ["retry", "--queue"],
    ["replay", "--name", "again", "--queue"],
]


def arguments(command: list[str], queue: str) -> list[str]:
    if command[-1] == "--queue" or command == ["stats", "orders"]:
        return [*command, queue]
    return [command[0], queue, *command[1:]]


@pytest.mark.long_on_servers
@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_a_mistyped_queue(cli: Cli, url: str, command: list[str]) -> None:
    published(url, [Message(queue="orders", payload=b"1"), Message(queue="mails", payload=b"1")])
    output = cli(*arguments(command, "ordres"))
    assert output.code == 1
    assert bool(output.out) is (command[0] in ("list", "stats"))
    assert output.err == "millpond: there is no queue 'ordres'; the nearest one is 'orders'\n"
    assert list(cli.ok("stats", "--json").json["queues"]) == ["mails", "orders"], "nothing was created"
    cli.ok(*arguments(command, "orders"))


@pytest.fixture
def target(tmp_path: Path) -> str:
    url = f"sqlite:///{tmp_path}/target.db"

    async def make() -> None:
        await (await connect(url, migrate=True)).close()

    asyncio.run(make())
    return url


def test_a_bridge_from_a_mistyped_queue(cli: Cli, url: str, target: str) -> None:
    published(url, [Message(queue="orders", payload=b"1")])
    bridge = ["bridge", url, target, "--once", "--queue"]
    assert "there is no queue 'ordres'; the nearest one is 'orders'" in cli.fails(
        1, *bridge, "orders", "--queue", "ordres"
    )
    assert list(cli.ok("stats", "--json").json["queues"]) == ["orders"]
    assert cli.ok(*bridge, "orders").out == "1 moved\n"
    assert cli.ok(*bridge, "orders").out == "0 moved\n"


def test_a_relay_may_begin_before_its_first_message(sqlite_url: str, caplog: pytest.LogCaptureFixture) -> None:
    async def check() -> None:
        source = await connect(sqlite_url, migrate=True)
        await check_queues(source, ["orders"], may_come=True)
        await source.close()

    asyncio.run(check())
    assert "there is no queue 'orders'; there are none; waiting for its first message" in caplog.text


def test_other_names_are_listed(cli: Cli, url: str) -> None:
    assert "there is no queue 'orders'; there are none" in cli.fails(1, "pause", "orders")
    published(url, [Message(queue="mails", payload=b"1"), Message(queue="audit", payload=b"1")])
    assert "there is no queue 'orders'; there are audit, mails" in cli.fails(1, "pause", "orders")


@pytest.mark.long_on_servers
@pytest.mark.parametrize("command", [["pause"], ["retain", "--failed", "7d"]], ids=" ".join)
def test_a_queue_may_be_set_up_before_its_first_message(cli: Cli, url: str, command: list[str]) -> None:
    cli.ok(*arguments(command, "orders"), "--create")
    cli.ok("stats", "orders")
    cli.ok("resume", "orders")
    cli.ok(*arguments(command, "orders"))


def test_a_queue_with_archived_messages_only(cli: Cli, url: str) -> None:
    (id_,) = published(url, [Message(queue="orders", payload=b"1")])
    cli.ok("cancel", id_)
    assert "1 published again" in cli.ok("retry", "--queue", "orders").out


def test_a_queue_of_a_broker(cli: Cli, rabbitmq_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A broker cannot list its queues, and a mistyped name must not declare one."""
    monkeypatch.setenv("MILLPOND_URL", rabbitmq_url)
    cli.ok("publish", "orders", "1")
    for command in (["list"], ["retry", "--queue"], ["replay", "--name", "again", "--queue"]):
        cli.ok(*arguments(command, "orders"))
        for _ in range(2):
            output = cli(*arguments(command, "ordres"))
            assert output.code == 1 and "there is no queue 'ordres'" in output.err


@pytest.mark.parametrize("kind", ["sqlite", "postgres", "mariadb", "rabbitmq"])
def test_has_queue(kind: str, request: pytest.FixtureRequest) -> None:
    url = request.getfixturevalue(f"{kind}_url")

    async def work() -> None:
        options = {} if kind == "rabbitmq" else {"migrate": True}
        transport = await connect(url, **options)
        try:
            assert not await transport.operations.has_queue("q")
            await transport.publish([Message(queue="q", payload=b"")])
            assert await transport.operations.has_queue("q")
            assert not await transport.operations.has_queue("Q")
        finally:
            await transport.close()

    asyncio.run(work())
