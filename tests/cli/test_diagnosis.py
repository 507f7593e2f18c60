"""`millpond why` and `millpond doctor`."""

from uuid import uuid4

from millpond import Message
from tests.cli.conftest import Cli, published


def test_why_names_the_reason_to_act_on_first(cli: Cli, url: str) -> None:
    (id_,) = published(url, [Message(queue="orders", payload=b"1", delay=3600)])
    cli.ok("pause", "orders")
    lines = cli.ok("why", id_).out.splitlines()
    assert lines[0] == f"{id_} in orders is PENDING"
    assert lines[1].startswith("1. its queue is paused") and lines[2].strip() == "millpond resume orders"
    answer = cli.ok("why", id_, "--json").json
    assert [reason["kind"] for reason in answer["reasons"]] == ["paused", "no-worker", "not-due"]
    assert cli.ok("why", str(uuid4()), "--json").json["reasons"][0]["kind"] == "unknown"
    assert "not a UUID" in cli.fails(2, "why", "x")


def test_doctor_prints_findings_and_remedies(cli: Cli, url: str) -> None:
    output = cli("doctor", "--json")
    assert output.code in (0, 1), output
    assert all(finding["remedy"] for finding in output.json["findings"])
    text = cli("doctor").out
    assert text == "nothing hurts\n" or text.startswith(("error: ", "warning: "))
