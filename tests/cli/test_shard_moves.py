"""`millpond shards`: change the map of shards."""

from pathlib import Path

import pytest

from tests.cli.conftest import Cli


@pytest.fixture
def two(cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Two shards with 100 messages."""
    urls = [f"sqlite:///{tmp_path / name}.db" for name in "ab"]
    monkeypatch.setenv("MILLPOND_URL", " ".join(urls))
    cli.ok("shards", "init", "--names", "a,b")
    lines = "".join(f'{{"n": {n}}}\n' for n in range(100))
    cli.ok("publish", "q", "--json-lines", "-", stdin=lines.encode())
    return urls


def ranges(cli: Cli) -> dict[str, list[str]]:
    return {one["name"]: one["key_ranges"] for one in cli.ok("shards", "status", "--json").json["shards"]}


def live(cli: Cli) -> dict[str, int]:
    return {one["name"]: one["live"] for one in cli.ok("shards", "status", "--json").json["shards"]}


def test_a_new_database_takes_a_part_of_the_keys(
    cli: Cli, two: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = live(cli)
    three = [*two, f"sqlite:///{tmp_path / 'c'}.db"]
    monkeypatch.setenv("MILLPOND_URL", " ".join(three))
    assert cli.ok("shards", "add", "c", "--json").json["shards"] == {"a": ["-80"], "b": ["80-"], "c": []}
    planned = cli.ok("shards", "split", "-80", "--to", "c", "--dry-run", "--json").json
    assert planned["dry_run"] and planned["moves"][0]["change"] == "move 40-80 from a to c"
    assert live(cli) == {**before, "c": 0}
    moved = cli.ok("shards", "split", "-80", "--to", "c", "--json").json["moves"][0]["moved"]
    assert moved == planned["moves"][0]["waiting"] > 0
    assert ranges(cli) == {"a": ["-40"], "b": ["80-"], "c": ["40-80"]}
    assert live(cli) == {**before, "a": before["a"] - moved, "c": moved}
    output = cli("shards", "merge", "a", "--to", "c")
    assert output.code == 0 and "move -40 from a to c: done" in output.err
    assert ranges(cli) == {"a": [], "b": ["80-"], "c": ["-80"]}
    assert cli.ok("shards", "move", "-80", "--to", "c").out.strip() == "c has -80"
    assert "no change" in cli.ok("shards", "abort").out
    assert sum(live(cli).values()) == 100


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["move", "-80", "--to", "z"], "there is no shard 'z'"),
        (["move", "x", "--to", "a"], "there is no shard 'x'"),
        (["move", "8-", "--to", "a"], "is no key range"),
        (["split", "-80", "--at", "90", "--to", "b"], "is not inside the key range"),
    ],
)
def test_wrong_input(cli: Cli, two: list[str], arguments: list[str], text: str) -> None:
    assert text in cli.fails(2, "shards", *arguments)
