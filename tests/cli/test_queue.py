"""`millpond queue show` and `millpond queue set`."""

import pytest

from tests.cli.conftest import Cli


def test_settings_are_changed_one_by_one_and_removed(cli: Cli, url: str) -> None:
    cli.ok("queue", "set", "orders", "--create", "--lease", "60s", "--retry-attempts", "0", "--retry-initial", "10s")
    output = cli.ok("queue", "set", "orders", "--retry-maximum", "1h", "--max-crashes", "0", "--json").json
    assert (output["lease"], output["max_crashes"], output["max_deliveries"]) == (60, 0, None)
    assert (output["retry"]["initial"], output["retry"]["maximum"], output["retry"]["attempts"]) == (10, 3600, 0)
    assert cli.ok("queue", "show", "orders", "--json").json == output
    assert "lease: 60.0\n" in cli.ok("queue", "show", "orders").out
    cli.ok("queue", "set", "orders", "--retry", "default", "--lease", "default")
    left = cli.ok("queue", "show", "orders", "--json").json
    assert (left["retry"], left["lease"], left["max_crashes"]) == (None, None, 0)
    assert "retry: default" in cli.ok("queue", "show", "orders").out


@pytest.mark.parametrize(
    ("code", "arguments", "text"),
    [
        (1, ["set", "ordres", "--lease", "5s"], "there is no queue 'ordres'"),
        (1, ["show", "ordres"], "there is no queue 'ordres'"),
        (2, ["set", "q", "--create"], "no setting was given: give --lease, --retry-attempts"),
        (2, ["set", "q", "--create", "--lease", "soon"], "--lease 'soon' is not a duration"),
        (2, ["set", "q", "--create", "--max-crashes", "few"], "--max-crashes 'few' is not a number"),
        (2, ["set", "q", "--create", "--retry-jitter", "7"], "jitter must be between 0 and 1"),
        (2, ["set", "q", "--create", "--retry", "5"], '--retry takes "default" only'),
    ],
)
def test_wrong_input(
    cli: Cli, sqlite_url: str, monkeypatch: pytest.MonkeyPatch, code: int, arguments: list[str], text: str
) -> None:
    cli.ok("migrate", sqlite_url)
    monkeypatch.setenv("MILLPOND_URL", sqlite_url)
    assert text in cli.fails(code, "queue", *arguments)
