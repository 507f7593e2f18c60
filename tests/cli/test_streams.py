"""`millpond streams` and `millpond streams release`."""

from pathlib import Path
from typing import Any

from millpond import Message
from tests import templates
from tests.cli.conftest import Cli, published, with_store


def hold(url: str, name: str = "audit", count: int = 3) -> None:
    """Leave claims of a stream behind, as a driver that dies during a batch does."""
    published(url, [Message(queue="orders", payload=b"1") for _ in range(count)])
    with_store(url, lambda store: claim(store, name, count))


async def claim(store: Any, name: str = "audit", count: int = 3) -> None:
    epoch, acked = await store.streams.open(name)
    assert (await store.streams.claim(name, epoch, acked + 1, ["orders"], count)).messages == count


def test_without_streams(cli: Cli, url: str) -> None:
    assert cli.ok("streams").out == "no streams\n"
    assert cli.ok("streams", "--json").json == {"streams": []}


def test_lists_the_messages_of_each_stream(cli: Cli, url: str) -> None:
    hold(url)
    hold(url, "red\x1b[31m", 2)
    output = cli.ok("streams").out
    assert "audit" in output and "red\\x1b[31m" in output
    first, second = cli.ok("streams", "--json").json["streams"]
    assert (first["name"], first["held"], first["acked_seq"], first["epoch"]) == ("audit", 3, 0, 1)
    assert first["held_for"] >= 0 and first["opened_at"].endswith("Z") and second["held"] == 2
    assert (first["queues"], first["waiting"], second["waiting"]) == (["orders"], 0, 0)
    published(url, [Message(queue="orders", payload=b"1") for _ in range(1234)])
    assert "1,234" in cli.ok("streams").out and "waiting behind" in cli.ok("top", "--once").out
    assert "held by a stream" in cli.ok("list", "--state", "processing").out


def test_an_alert_fails_when_messages_are_held_for_long(cli: Cli, url: str) -> None:
    assert cli.ok("streams", "--alert", "0s").out == "no streams\n"
    hold(url)
    assert "audit" in cli.ok("streams", "--alert", "1h").out
    text = cli.fails(1, "streams", "--alert", "0s")
    assert "held for more than 0s: audit" in text and "millpond streams release NAME" in text
    cli.ok("streams", "release", "audit")
    cli.ok("streams", "--alert", "0s")
    assert "not a duration" in cli.fails(2, "streams", "--alert", "soon")


def test_release_gives_them_back(cli: Cli, url: str) -> None:
    hold(url)
    assert cli.ok("streams", "release", "audit").out == "3 given back by audit\n"
    assert cli.ok("stats", "--json").json["queues"]["orders"]["PENDING"] == 3
    assert cli.ok("streams", "release", "audit", "--json").json == {"stream": "audit", "released": 0}
    assert cli.ok("streams", "--json").json["streams"][0]["epoch"] == 3


def test_streams_over_shards(cli: Cli, tmp_path: Path) -> None:
    urls = templates.shards(tmp_path)
    over = " ".join(urls)
    published(over, [Message(queue="orders", payload=b"1", key=f"key-{n}") for n in range(50)])
    for url in urls[:2]:
        with_store(url, claim)
    (stream,) = cli.ok("streams", "--json", "--url", over).json["streams"]
    assert (stream["name"], stream["held"]) == ("audit", 6)
    assert "audit" in cli.ok("top", "--once", "--url", over).out
    assert cli.ok("streams", "release", "audit", "--url", over).out == "6 given back by audit\n"


def test_a_release_names_the_missing_argument(cli: Cli, url: str) -> None:
    hold(url)
    assert "there are 'audit'" in cli.fails(1, "streams", "release", "audits")
    assert "no stream given" in cli.fails(2, "streams", "release")
    assert "release" in cli.fails(2, "streams", "remove", "audit")
