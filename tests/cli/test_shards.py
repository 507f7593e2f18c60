"""`millpond shards init` and `status`, commands over several databases, and `millpond run` on a part of them."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

import millpond
from millpond import Message
from tests.cli.conftest import Cli

NAMES = ["a", "b", "c"]


@pytest.fixture
def urls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    found = [f"sqlite:///{tmp_path / name}.db" for name in NAMES]
    monkeypatch.setenv("MILLPOND_URL", " ".join(found))
    return found


@pytest.fixture
def pond(cli: Cli, urls: list[str]) -> list[str]:
    """The URLs of a pond of three shards."""
    cli.ok("shards", "init", "--names", "a,b,c")
    return urls


def publish(urls: list[str], count: int) -> None:
    async def work() -> None:
        store = await millpond.connect(urls)
        await store.publish([Message(queue="q", payload=b"1", key=f"k{n}") for n in range(count)])
        await store.close()

    asyncio.run(work())


def test_init_prints_the_map_and_may_be_repeated(cli: Cli, urls: list[str]) -> None:
    first = cli.ok("shards", "init", "--names", "a,b,c", "--json").json
    assert first["version"] == 1 and list(first["shards"]) == NAMES
    assert cli.ok("shards", "init", *urls, "--names", "a, b, c", "--json").json == first
    lines = cli.ok("shards", "init", "--names", "a,b,c").out.splitlines()
    assert [line.split()[0] for line in lines if line.split()[:1] and line.split()[0] in NAMES] == NAMES


@pytest.mark.parametrize(
    ("code", "arguments", "text"),
    [
        (2, ["--names", "a,b"], "3 URLs and 2 names were given"),
        (2, ["--names", "a,b,a"], "two shards have the same name"),
        (2, ["--names", "a,b,-"], "the shard name '-' must begin with"),
        (2, ["memory://"], "a shard must be a database"),
    ],
)
def test_wrong_input(cli: Cli, urls: list[str], code: int, arguments: list[str], text: str) -> None:
    assert text in cli.fails(code, "shards", "init", *arguments)


def test_another_map_is_refused(cli: Cli, pond: list[str]) -> None:
    assert "one of the databases is a shard already" in cli.fails(1, "shards", "init", "--names", "x,y,z")


def test_status_shows_a_hot_shard_and_the_time_of_its_answer(cli: Cli, pond: list[str]) -> None:
    publish(pond, 60)
    found: Any = cli.ok("shards", "status", "--json").json["shards"]
    assert [one["name"] for one in found] == NAMES and all(one["answers"] for one in found)
    assert sum(one["live"] for one in found) == 60 and all(one["seconds"] >= 0 for one in found)
    lines = cli.ok("shards", "status").out.splitlines()
    assert "live" in lines[0] and "answer" in lines[0] and all("ms" in line for line in lines[-3:])


def test_status_shows_a_shard_that_does_not_answer(cli: Cli, pond: list[str]) -> None:
    dead = "postgresql://nobody:x@127.0.0.1:1/none"
    found: Any = cli.ok("shards", "status", pond[0], dead, pond[2], "--json").json["shards"]
    assert [(one["name"], one["answers"]) for one in found] == [("a", True), ("b", False), ("c", True)]
    output = cli("shards", "status", pond[0], dead, pond[2])
    assert "none" in output.out
    assert output.err.startswith("b does not answer: ") and found[1]["error"] in output.err


def test_status_of_a_shard_without_a_key_range(cli: Cli, pond: list[str]) -> None:
    cli.ok("shards", "merge", "a", "--to", "b", "--json")
    assert "no shard map" not in cli.ok("shards", "status").out


def test_status_shows_an_old_map(cli: Cli, pond: list[str]) -> None:
    path = Path(pond[0].removeprefix("sqlite:///"))
    before = path.read_bytes()
    cli.ok("shards", "move", "aa-", "--to", "b", "--json")
    path.write_bytes(before)
    assert "millpond shards sweep" in cli("shards", "status").err
    cli.ok("shards", "sweep")
    cli.ok("shards", "status")


def test_status_of_databases_without_a_map(cli: Cli, urls: list[str]) -> None:
    for url in urls:
        cli.ok("migrate", url)
    assert cli.ok("shards", "status").out.count("no shard map") == 3


APP = """
from millpond import Millpond
pond = Millpond({urls!r})

@pond.subscriber("q")
async def handle(body: int) -> None:
    pass
"""


@pytest.mark.parametrize(
    ("arguments", "left"), [(["--shards", "a,c"], {"b"}), (["--key-range", "-55"], {"b", "c"}), ([], set())]
)
def test_run_takes_the_messages_of_some_shards(
    cli: Cli,
    pond: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    arguments: list[str],
    left: set[str],
) -> None:
    ranges = {one["name"]: one["key_ranges"] for one in cli.ok("shards", "status", "--json").json["shards"]}
    arguments = [ranges["a"][0] if text == "-55" else text for text in arguments]
    publish(pond, 60)
    name = f"app_{tmp_path.name.replace('-', '_')}"
    (tmp_path / f"{name}.py").write_text(APP.format(urls=pond))
    monkeypatch.syspath_prepend(tmp_path)
    output = cli("run", f"{name}:pond", "--until-idle", *_joined(arguments))
    assert output.code == 0, output
    found: Any = cli.ok("shards", "status", "--json").json["shards"]
    assert {one["name"] for one in found if one["live"]} == left


def _joined(arguments: list[str]) -> list[str]:
    """`--key-range=-55`: a value that begins with a dash needs the sign."""
    return ["=".join(arguments)] if arguments else []


@pytest.mark.parametrize("arguments", [["--shards=a,x"], ["--key-range=-80"], ["--key-range=zz"]])
def test_run_refuses_a_part_that_does_not_match_the_map(
    cli: Cli, pond: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str]
) -> None:
    name = f"app_{tmp_path.name.replace('-', '_')}"
    (tmp_path / f"{name}.py").write_text(APP.format(urls=pond))
    monkeypatch.syspath_prepend(tmp_path)
    output = cli("run", f"{name}:pond", "--until-idle", *arguments)
    assert output.code == 2 and "millpond: " in output.err, output
