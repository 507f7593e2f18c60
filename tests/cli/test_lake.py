"""What is wrong with what was typed is told in one line, before Spark starts."""

from pathlib import Path

import pytest

from tests.cli.conftest import Cli


@pytest.mark.parametrize("command", [["export"], ["run"]])
@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--lake", "lake"], "which database?"),
        (["--lake", "s3://bucket/lake", "--url", "sqlite:///a.db"], "a lake is a folder"),
        (["--lake", "lake", "--url", "amqp://localhost"], "amqp:// is none"),
        (["--lake", "lake", "--url", "sqlite:///a.db sqlite:///a.db"], "one database twice"),
        (["--lake", "lake", "--url", "sqlite:///a.db", "--every", "soon"], "no duration"),
        (["--url", "sqlite:///a.db"], "--lake"),
    ],
)
def test_wrong_arguments(cli: Cli, command: list[str], arguments: list[str], said: str) -> None:
    assert said in cli.fails(2, "lake", *command, *arguments)


def test_wrong_steps(cli: Cli, tmp_path: Path) -> None:
    where = ("--lake", str(tmp_path), "--url", "sqlite:///a.db")
    assert "sing" in cli.fails(2, "lake", "run", *where, "--step", "sing")
    assert "--report-to" in cli.fails(2, "lake", "run", *where, "--step", "report")
    assert "there is no lake" in cli.fails(2, "lake", "files", "--lake", str(tmp_path))
    assert "amqp:// is none" in cli.fails(2, "lake", "exports", "--url", "amqp://localhost")
