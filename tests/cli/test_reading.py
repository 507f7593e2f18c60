"""`millpond stats`, `list` and `show`."""

import os
import subprocess
import sys
from uuid import uuid4

import pytest

from millpond import Ack, Message, Nack, Reject
from tests.cli.conftest import Cli, published, settled, with_store

pytestmark = pytest.mark.long_on_servers  # they call rooms, which are tested on servers

COUNTS = ["PENDING", "PROCESSING", "RETRYABLE", "COMPLETED", "FAILED"]


def fill(url: str) -> dict[str, list[str]]:
    """Three PENDING messages, and one in each other state except PROCESSING."""
    ids = {}
    published(url, [Message(queue="orders", payload=b'{"n": 1}')])
    ids["COMPLETED"] = settled(url, "orders", lambda claim: Ack(claim.receipt))
    published(url, [Message(queue="orders", payload=b'{"n": 2}')])
    ids["FAILED"] = settled(url, "orders", lambda claim: Reject(claim.receipt, "no stock", error="ValueError: 0"))
    published(url, [Message(queue="orders", payload=b'{"n": 3}')])
    ids["RETRYABLE"] = settled(url, "orders", lambda claim: Nack(claim.receipt, delay=3600, error="timeout"))
    ids["PENDING"] = published(url, [Message(queue="orders", payload=b"%d" % n) for n in range(3)])
    return ids


def test_a_full_page_names_the_next_one(cli: Cli, url: str) -> None:
    ids = fill(url)
    seen, more = [], []
    while True:
        out = cli.ok("list", "orders", "--limit", "2", *more).out
        seen += [line.split()[0] for line in out.splitlines() if line[:1].isdigit()]
        if "--cursor" not in out:
            break
        more = out.split("continue with ")[1].split()
    assert sorted(seen) == sorted(id_ for some in ids.values() for id_ in map(str, some))


def test_list_filters(cli: Cli, url: str) -> None:
    fill(url)
    for arguments in (["--path", "n=2"], ["--error", "STOCK"], ["--text", '"n": 2']):
        (found,) = cli.ok("list", *arguments, "--json").json["messages"]
        assert found["reason"] == "no stock"
    assert cli.ok("list", "--key", "nobody", "--json").json["messages"] == []
    assert cli.ok("retry", "--queue", "orders", "--path", "n=1", "--preview").out.startswith("0 would")
    assert cli.ok("retry", "--queue", "orders", "--path", "n=2", "--preview").out.startswith("1 would")


def test_json_has_no_control_characters(cli: Cli, url: str) -> None:
    """A terminal obeys U+009B as it obeys ESC [, and shows text after U+202E backwards"""
    headers = {"a": "\x9b31m\u202e\u2028\x1b[2J\U000e0001", "city": "München"}
    published(url, [Message(queue="orders", payload=b"x", headers=headers)])
    result = cli.ok("list", "orders", "--json")
    assert "München" in result.out and all(c.isprintable() for c in result.out.rstrip("\n"))
    assert result.json["messages"][0]["headers"] == headers


def test_stats_as_json(cli: Cli, url: str) -> None:
    assert cli.ok("stats", "--json").json == {"queues": {}}
    fill(url)
    output = cli.ok("stats", "--json").json
    assert list(output) == ["queues"] and list(output["queues"]) == ["orders"]
    counts = output["queues"]["orders"]
    assert [counts[state] for state in COUNTS] == [3, 0, 1, 1, 1]
    assert (counts["approximate"], counts["paused"]) == (False, False)
    assert counts["oldest_due_at"].endswith("Z")


def test_stats_of_some_queues(cli: Cli, url: str) -> None:
    fill(url)
    published(url, [Message(queue="mails", payload=b"1")])
    result = cli("stats", "mails", "nothing", "--json", "--exact")
    assert result.code == 1 and "there is no queue 'nothing'" in result.err
    output = result.json["queues"]
    assert set(output) == {"mails", "nothing"}
    assert [output["mails"][state] for state in COUNTS] == [1, 0, 0, 0, 0]
    assert [output["nothing"][state] for state in COUNTS] == [0, 0, 0, 0, 0]


def test_stats_as_a_table(cli: Cli, url: str) -> None:
    assert cli.ok("stats").out == "no messages\n"
    fill(url)
    cli.ok("pause", "orders")
    head, line = cli.ok("stats").out.splitlines()
    assert head.split()[:6] == ["queue", *COUNTS]
    assert line.split()[:6] == ["orders", "3", "0", "1", "1", "1"]
    assert line.split()[-1] == "paused"


def test_list_has_live_messages_and_archived_ones(cli: Cli, url: str) -> None:
    assert cli.ok("list").out == "no messages\n"
    ids = fill(url)
    rows = cli.ok("list", "orders", "--json").json["messages"]
    assert sorted(row["state"] for row in rows) == sorted(["PENDING"] * 3 + ["RETRYABLE", "COMPLETED", "FAILED"])
    for state, expected in ids.items():
        rows = cli.ok("list", "orders", "--state", state.lower(), "--json").json["messages"]
        assert sorted(row["id"] for row in rows) == sorted(expected)
    rows = cli.ok("list", "--state", "FAILED", "--state", "COMPLETED", "--json").json["messages"]
    assert [row["id"] for row in rows] == ids["FAILED"] + ids["COMPLETED"], "newest first"
    assert len(cli.ok("list", "--limit", "4", "--json").json["messages"]) == 4
    assert cli("list", "nothing", "--json").json == {"messages": []}


def test_list_as_a_table(cli: Cli, url: str) -> None:
    ids = fill(url)
    out = cli.ok("list").out
    assert len(out.splitlines()) == 7
    assert all(id_ in out for some in ids.values() for id_ in some), "ids are never cut"
    assert "no stock: ValueError: 0" in out


def test_show_prints_all_fields(cli: Cli, url: str) -> None:
    ids = fill(url)
    failed = cli.ok("show", ids["FAILED"][0], "--json").json
    assert failed.pop("id") == ids["FAILED"][0]
    times = {name: failed.pop(name) for name in list(failed) if name.endswith("_at")}
    assert {"created_at", "due_at", "archived_at", "first_attempt_at", "last_attempt_at"} <= set(times)
    (attempt,) = failed.pop("failed_attempts")
    assert attempt["error"] == "ValueError: 0" and attempt["ended_at"] >= attempt["claimed_at"]
    assert "ValueError: 0" in cli.ok("show", ids["FAILED"][0]).out.splitlines()[-1]
    assert failed == {
        "queue": "orders",
        "priority": 50,
        "state": "FAILED",
        "deliveries": 1,
        "attempts": 1,
        "crashes": 0,
        "reason": "no stock",
        "error": "ValueError: 0",
        "body": {"n": 2},
    }
    assert cli.ok("show", ids["RETRYABLE"][0], "--json").json["error"] == "timeout"
    lines = cli.ok("show", ids["PENDING"][0]).out.splitlines()
    assert lines[0].split() == ["id", ids["PENDING"][0]] and lines[-1].split() == ["body", "0"]


def test_show_of_an_unknown_message(cli: Cli, url: str) -> None:
    id_ = str(uuid4())
    assert f"there is no message {id_}" in cli.fails(1, "show", id_)
    assert "not a UUID; millpond publish and millpond list print" in cli.fails(2, "show", "order-7")


def test_bodies_that_are_not_json(cli: Cli, url: str) -> None:
    (text,) = published(
        url, [Message(queue="q", payload="schön".encode(), headers={"content-type": "text/plain; charset=utf-8"})]
    )
    (binary,) = published(url, [Message(queue="q", payload=b"\xff\x00")])
    assert cli.ok("show", text, "--json").json["body"] == "schön"
    assert cli.ok("show", binary, "--json").json["body"] == {"base64": "/wA="}


def test_text_from_messages_is_printed_literally(cli: Cli, url: str) -> None:
    queue = "[red]\x1b[31m\x07"
    published(url, [Message(queue=queue, payload=b'"\xe2\x80\xae[bold]\\u001b[2J"')])
    for command in ("stats", "list"):
        out = cli.ok(command).out
        assert "\x1b" not in out and "\x07" not in out and "[red]\\x1b[31m\\x07" in out
    assert cli.ok("list", queue, "--json").json["messages"][0]["queue"] == queue


def test_the_command_and_the_module_are_the_same(sqlite_url: str) -> None:
    environment = {**os.environ, "MILLPOND_URL": sqlite_url}

    def output(*command: str) -> str:
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True, timeout=60)
        return done.stdout

    module = [sys.executable, "-m", "millpond"]
    script = [os.path.join(os.path.dirname(sys.executable), "millpond")]
    assert output(*module, "--version") == output(*script, "--version") == "millpond 0.1.0\n"
    assert output(*module, "--help") == output(*module) == output(*script, "--help")
    output(*module, "migrate")
    assert output(*script, "stats", "--json").strip() == '{"queues": {}}'


def test_a_closed_pipe_is_no_error(sqlite_url: str) -> None:
    published(sqlite_url, [Message(queue="q", payload=b"1") for _ in range(5000)])
    command = f"{sys.executable} -m millpond list --limit 5000 --json --url {sqlite_url} | head -c 10"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=True, timeout=60)
    assert (done.stdout, done.stderr) == ('{"messages', "")


@pytest.mark.parametrize(
    "args", [["stats", "--state"], ["list", "--state", "BROKEN"], ["list", "--limit", "0"], ["nonsense"]]
)
def test_wrong_usage_is_one_line(cli: Cli, args: list[str]) -> None:
    cli.fails(2, *args)


def test_reading_changes_nothing(cli: Cli, url: str) -> None:
    fill(url)
    before = with_store(url, lambda store: store.operations.browse())
    for command in (["stats"], ["list"], ["show", str(before[0].id)]):
        cli.ok(*command)
    assert with_store(url, lambda store: store.operations.browse()) == before
