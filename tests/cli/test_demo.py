"""`millpond demo`, as `make demo` runs it."""

from pathlib import Path

import pytest

from tests.cli.conftest import Cli


def test_the_demo_runs_and_runs_again(cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for _ in range(2):
        said = cli("demo")
        assert said.code == 0, said.err
        assert "Published 3,000 orders" in said.out
        assert "retries used up: TimeoutError: the carrier does not answer" in said.out
        assert "and came through" in said.out
        counts = cli.ok("stats", "--url", "sqlite:///millpond-demo/orders.db", "--json").json["queues"]["orders"]
        assert counts["COMPLETED"] + counts["FAILED"] == 3001, "all, and the one that was retried"
        assert counts["PENDING"] == counts["PROCESSING"] == counts["RETRYABLE"] == 0


def test_the_demo_clears_no_folder_but_its_own(cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "millpond-demo").mkdir()
    (tmp_path / "millpond-demo" / "thesis.txt").write_text("years of work")
    assert "move it away first" in cli.fails(2, "demo")
    assert (tmp_path / "millpond-demo" / "thesis.txt").exists()
