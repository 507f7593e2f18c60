"""`millpond done`, and `millpond retry --queue` with RETRYABLE messages."""

from millpond import Message, Nack
from tests.cli.conftest import Cli, published, settled


def test_waiting_messages_are_completed(cli: Cli, url: str) -> None:
    one, other = published(url, [Message(queue="q", payload=b"1"), Message(queue="q", payload=b"2")])
    assert cli.ok("done", one).out == "1 done\n"
    assert '"COMPLETED"' in cli.ok("show", one, "--json").out
    assert "nothing was done" in (error := cli("done", one).err) and "--force" in error
    assert cli.ok("done", other, "--force", "--json").json == {"done": [other]}


def test_retry_of_a_queue_reports_messages_that_are_due_now(cli: Cli, url: str) -> None:
    published(url, [Message(queue="q", payload=b"1") for _ in range(3)])
    settled(url, "q", lambda claim: Nack(claim.receipt, delay=99_999))
    assert cli.ok("retry", "--queue", "q").out == "3 due now\n"
    assert len(settled(url, "q", lambda claim: Nack(claim.receipt, delay=1))) == 3
