"""`millpond streams` and `millpond streams release`."""

from typing import Any

from millpond import Message
from tests.cli.conftest import Cli, published, with_store


def hold(url: str, name: str = "audit", count: int = 3) -> None:
    """As a driver that died with a batch in hand."""
    published(url, [Message(queue="orders", payload=b"1") for _ in range(count)])

    async def work(store: Any) -> None:
        epoch, acked = await store.open_stream(name)
        assert (await store.claim_for_stream(name, epoch, acked + 1, ["orders"], count)).messages == count

    with_store(url, work)


def test_without_streams(cli: Cli, url: str) -> None:
    assert cli.ok("streams").out == "no streams\n"
    assert cli.ok("streams", "--json").json == {"streams": []}


def test_lists_what_each_holds(cli: Cli, url: str) -> None:
    hold(url)
    hold(url, "red\x1b[31m", 2)
    said = cli.ok("streams").out
    assert "audit" in said and "red\\x1b[31m" in said
    first, second = cli.ok("streams", "--json").json["streams"]
    assert (first["name"], first["held"], first["acked_seq"], first["epoch"]) == ("audit", 3, 0, 1)
    assert first["held_for"] >= 0 and first["opened_at"].endswith("Z") and second["held"] == 2
    assert "held by a stream" in cli.ok("list", "--state", "processing").out


def test_an_alert_fails_where_messages_are_held_for_long(cli: Cli, url: str) -> None:
    assert cli.ok("streams", "--alert", "0s").out == "no streams\n"
    hold(url)
    assert "audit" in cli.ok("streams", "--alert", "1h").out
    assert "held for more than 0s: audit" in cli.fails(1, "streams", "--alert", "0s")
    cli.ok("streams", "release", "audit")
    cli.ok("streams", "--alert", "0s")
    assert "no duration" in cli.fails(2, "streams", "--alert", "soon")


def test_release_gives_them_back(cli: Cli, url: str) -> None:
    hold(url)
    assert cli.ok("streams", "release", "audit").out == "3 given back by audit\n"
    assert cli.ok("stats", "--json").json["queues"]["orders"]["PENDING"] == 3
    assert cli.ok("streams", "release", "audit", "--json").json == {"stream": "audit", "released": 0}
    assert cli.ok("streams", "--json").json["streams"][0]["epoch"] == 3


def test_a_release_says_what_is_missing(cli: Cli, url: str) -> None:
    hold(url)
    assert "there are 'audit'" in cli.fails(1, "streams", "release", "audits")
    assert "which stream" in cli.fails(2, "streams", "release")
    assert "release" in cli.fails(2, "streams", "remove", "audit")
