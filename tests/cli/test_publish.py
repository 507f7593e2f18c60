"""`millpond publish`."""

from pathlib import Path
from uuid import UUID, uuid4

import pytest

from millpond.codec import CONTENT_TYPE, TEXT
from millpond.message import Claim
from tests.cli.conftest import Cli, with_store

pytestmark = pytest.mark.long_on_servers  # they call rooms, which are tested on servers


def claimed(url: str, queue: str = "orders") -> list[Claim]:
    claims: list[Claim] = with_store(url, lambda store: store.claim([queue], limit=1000))
    return claims


def test_prints_the_id(cli: Cli, url: str) -> None:
    output = cli.ok("publish", "orders", '{"sku": 7}')
    (claim,) = claimed(url)
    assert output.out == f"{claim.receipt.id}\n"
    assert (claim.message.payload, dict(claim.message.headers)) == (b'{"sku": 7}', {})


def test_takes_all_fields_of_a_message(cli: Cli, url: str) -> None:
    id_ = str(uuid4())
    options = ["--id", id_, "--key", "customer-7", "--priority", "10", "--expires", "1h"]
    output = cli.ok("publish", "orders", "7", *options, "--header", "trace=x", "--header", "a=b=c", "--json")
    assert output.json == {"id": id_, "new": True}
    (claim,) = claimed(url)
    message = claim.message
    assert (str(message.id), message.key, message.priority) == (id_, "customer-7", 10)
    assert message.headers == {"trace": "x", "a": "b=c"}
    assert claim.expires_us == claim.created_us + 3600 * 1_000_000


def test_a_delayed_message_is_not_due_yet(cli: Cli, url: str) -> None:
    cli.ok("publish", "orders", "1", "--delay", "15m")
    cli.ok("publish", "orders", "2", "--due-at", "2999-01-31T08:00:00Z")
    for text in ("soon", "tomorrow"):
        assert "neither a duration (30s, 7d) nor a time" in cli.fails(2, "publish", "orders", "3", "--expires", text)
    assert "has no time zone" in cli.fails(2, "publish", "orders", "3", "--expires", "2999-01-31T08:00:00")
    assert claimed(url) == []
    rows = with_store(url, lambda store: store.operations.browse("orders"))
    assert rows[0].due_us == rows[0].created_us + 900 * 1_000_000
    assert rows[1].due_at.isoformat() == "2999-01-31T08:00:00+00:00"


def test_the_same_id_twice_is_harmless_and_reported(cli: Cli, url: str) -> None:
    id_ = str(uuid4())
    cli.ok("publish", "orders", "1", "--id", id_)
    output = cli("publish", "orders", "1", "--id", id_)
    assert (output.code, output.out) == (0, f"{id_}\n")
    assert output.err == "millpond: a message with this id was already published; nothing was added\n"
    assert cli("publish", "orders", "1", "--id", id_, "--json").json == {"id": id_, "new": False}
    assert len(claimed(url)) == 1


def test_reads_a_body_from_stdin(cli: Cli, url: str) -> None:
    cli.ok("publish", "orders", "-", stdin=b'{"sku": 8}\n')
    assert claimed(url)[0].message.payload == b'{"sku": 8}\n'


def test_sends_text_with_the_option_text(cli: Cli, url: str) -> None:
    cli.ok("publish", "orders", "hello, wörld", "--text")
    (claim,) = claimed(url)
    assert claim.message.payload.decode() == "hello, wörld"
    assert claim.message.headers == {CONTENT_TYPE: TEXT}


def test_publishes_a_message_per_line(cli: Cli, url: str, tmp_path: Path) -> None:
    lines = b"".join(b'{"sku": %d}\n' % n for n in range(100)) + b"\n"
    ids = cli.ok("publish", "orders", "--json-lines", "-", "--key", "k", stdin=lines).out.split()
    assert len(set(ids)) == 100 and UUID(ids[0])
    (tmp_path / "more").write_bytes(b"1\r\n2")
    assert cli.ok("publish", "orders", "--json-lines", str(tmp_path / "more"), "--json").json["new"] == 2
    claims = claimed(url)
    assert [str(claim.receipt.id) for claim in claims][:100] == ids
    assert claims[0].message.key == "k"
    assert [claim.message.payload for claim in claims][-2:] == [b"1", b"2"]


def test_a_bad_line_publishes_nothing(cli: Cli, url: str) -> None:
    error = cli.fails(2, "publish", "orders", "--json-lines", "-", stdin=b'{"sku": 1}\nnot json\n')
    assert "line 2 is not JSON" in error and "Nothing was published" in error
    assert claimed(url) == []


@pytest.mark.parametrize(
    ("args", "text"),
    [
        (["orders"], "no body given"),
        (["orders", "1", "--json-lines", "-"], "not both"),
        (["orders", "hello"], "--text"),
        (["orders", "{"], "--text"),
        (["orders", "1", "--delay", "soon"], "30s, 15m, 12h or 7d"),
        (["orders", "1", "--delay", "-5s"], "30s, 15m, 12h or 7d"),
        (["orders", "1", "--delay", "9" * 30 + "d"], "100 years"),
        (["orders", "1", "--due-at", "tomorrow"], "2030-01-31T08:00:00Z"),
        (["orders", "1", "--due-at", "2030-01-31T08:00:00"], "add Z for UTC"),
        (["orders", "1", "--delay", "1s", "--due-at", "2030-01-31T08:00:00Z"], "not both"),
        (["orders", "1", "--priority", "101"], "0 (first) to 100 (last)"),
        (["orders", "1", "--priority", "high"], "--priority"),
        (["orders", "1", "--id", "order-7"], "not a UUID"),
        (["orders", "1", "--header", "trace"], "name=value"),
        (["", "1"], "must not be empty"),
        (["q" * 300, "1"], "the limit is 255"),
        (["orders", "--json-lines", "missing.jsonl"], "missing.jsonl: No such file"),
        (["orders", "1", "--prioritty", "1"], "--prioritty"),
    ],
)
def test_bad_input_is_an_error_and_nothing_is_published(
    cli: Cli, sqlite_url: str, monkeypatch: pytest.MonkeyPatch, args: list[str], text: str
) -> None:
    cli.ok("migrate", sqlite_url)
    monkeypatch.setenv("MILLPOND_URL", sqlite_url)
    assert text in cli.fails(2, "publish", *args)
    assert with_store(sqlite_url, lambda store: store.operations.browse()) == []
