"""Wrong arguments are reported in one line, before Spark starts."""

from pathlib import Path

import pytest

from millpond.errors import WrongLake
from tests.cli.conftest import Cli, with_store


@pytest.mark.parametrize("command", [["export"], ["run"]])
@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--lake", "lake"], "no database given"),
        (["--lake", "ftp://host/lake", "--url", "sqlite:///a.db"], "a lake is a folder"),
        (["--lake", "lake[1]", "--url", "sqlite:///a.db"], "a lake's path"),
        (["--lake", "lake", "--url", "sqlite:///a.db", "--connections", "0"], "--connections"),
        (["--lake", "lake", "--url", "amqp://localhost"], "amqp:// is none"),
        (["--lake", "lake", "--url", "sqlite:///a.db sqlite:///a.db"], "one database twice"),
        (["--lake", "lake", "--url", "sqlite:///a.db", "--every", "soon"], "not a duration"),
        (["--url", "sqlite:///a.db"], "--lake"),
    ],
)
def test_wrong_arguments(cli: Cli, command: list[str], arguments: list[str], text: str) -> None:
    assert text in cli.fails(2, "lake", *command, *arguments)


def test_wrong_steps(cli: Cli, tmp_path: Path) -> None:
    where = ("--lake", str(tmp_path), "--url", "sqlite:///a.db")
    assert "sing" in cli.fails(2, "lake", "run", *where, "--step", "sing")
    assert "--report-to" in cli.fails(2, "lake", "run", *where, "--step", "report")
    assert "there is no lake" in cli.fails(2, "lake", "files", "--lake", str(tmp_path))
    assert "amqp:// is none" in cli.fails(2, "lake", "exports", "--url", "amqp://localhost")


def test_exports_of_shards(cli: Cli, tmp_path: Path) -> None:
    """The list has all shards, and a lake that only one of them knows can be forgotten."""
    shards = [f"sqlite:///{tmp_path}/{name}.db" for name in ("a", "b")]
    for url in shards:
        cli.ok("migrate", url)
    urls = ("--url", " ".join(shards))
    assert cli.ok("lake", "exports", *urls).out == "exported to no lake\n"
    for shard, url in enumerate(shards):
        with_store(url, lambda store, n=shard: store.exports.open("both", shard=n, path="/lake", until=None))
    with_store(shards[1], lambda store: store.exports.open("one", shard=1, path="/other", until=None))
    found = cli.ok("lake", "exports", *urls, "--json").json["exports"]
    assert sorted((e["lake"], e["shard"]) for e in found) == [("both", 0), ("both", 1), ("one", 1)]
    assert "purge no longer waits for one" in cli.ok("lake", "exports", *urls, "--forget", "one").out
    assert "no longer waits for both" in cli.ok("lake", "exports", *urls, "--forget", "both").out
    assert cli.ok("lake", "exports", *urls).out == "exported to no lake\n"
    assert "'both'" in cli.fails(1, "lake", "exports", *urls, "--forget", "both")


def test_an_unknown_lake_names_the_command_that_forgets(cli: Cli, tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/a.db"
    cli.ok("migrate", url)
    with pytest.raises(WrongLake, match="millpond lake exports --forget"):
        with_store(url, lambda store: store.exports.open("lake", shard=0, path="/lake", until=7))


def test_follow_has_no_json(cli: Cli, tmp_path: Path) -> None:
    where = ("--lake", str(tmp_path), "--url", "sqlite:///a.db")
    assert "--follow has no JSON output" in cli.fails(2, "lake", "export", *where, "--follow", "--json")
