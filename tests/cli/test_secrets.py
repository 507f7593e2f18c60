"""URLs reach a command by the environment or a file, and its errors show no password."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from millpond import connect, transports
from tests.cli.conftest import Cli


@pytest.fixture
def two(tmp_path: Path) -> tuple[str, str]:
    """URLs of two migrated databases."""

    async def make(url: str) -> str:
        await (await connect(url)).close()
        return url

    first, second = (asyncio.run(make(f"sqlite:///{tmp_path}/{name}.db")) for name in ("first", "second"))
    return first, second


def test_a_bridge_takes_both_urls_from_the_environment(
    cli: Cli, two: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    cli.ok("publish", "orders", "{}", "--url", two[0])
    monkeypatch.setenv("MILLPOND_FROM_URL", two[0])
    monkeypatch.setenv("MILLPOND_TO_URL", two[1])
    assert cli.ok("bridge", "--queue", "orders", "--once", "--json").json == {"moved": 1, "left": 0}
    assert cli.ok("stats", "orders", "--json", "--url", two[1]).json


def test_a_bridge_takes_both_urls_from_files(cli: Cli, two: tuple[str, str], tmp_path: Path) -> None:
    cli.ok("publish", "orders", "{}", "--url", two[0])
    files = [tmp_path / "from.url", tmp_path / "to.url"]
    for file, url in zip(files, two, strict=True):
        file.write_text(f"{url}\n")
    assert cli.ok("bridge", *(f"@{file}" for file in files), "--queue", "orders", "--once", "--json").json == {
        "moved": 1,
        "left": 0,
    }


def test_a_bridge_without_urls_names_the_variables(cli: Cli, two: tuple[str, str]) -> None:
    assert "MILLPOND_FROM_URL" in cli.fails(2, "bridge", "--queue", "orders")
    assert "MILLPOND_TO_URL" in cli.fails(2, "bridge", two[0], "--queue", "orders")
    shown = cli.ok("bridge", "--help").out
    assert "MILLPOND_FROM_URL" in shown and "MILLPOND_TO_URL" in shown


def test_every_command_reads_its_url_from_a_file(
    cli: Cli, two: tuple[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "secret.url"
    file.write_text(two[0])
    cli.ok("publish", "orders", "{}", "--url", f"@{file}")
    cli.ok("migrate", f"@{file}")
    monkeypatch.setenv("MILLPOND_URL", f"@{file}")
    assert cli.ok("stats", "orders", "--json").json
    assert "cannot be read from @/nowhere" in cli.fails(2, "stats", "--url", "@/nowhere")


def test_an_unexpected_error_shows_no_password(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    async def broken(url: str, **_: Any) -> None:
        raise ValueError(f"bad DSN {url} with hunter2%40 and hunter2@")

    monkeypatch.setattr(transports, "connect", broken)
    monkeypatch.setenv("MILLPOND_URL", "postgresql://shop:hunter2%40@db/shop?sslpassword=keypass")
    for arguments in (["stats"], ["--debug", "stats"]):
        output = cli(*arguments)
        assert output.code == 1 and "bad DSN" in output.err
        assert "hunter2" not in output.err and "keypass" not in output.err
