"""`millpond retry`, `replay`, `reschedule`, `cancel`, `pause`, `resume`, `retain`, `purge`."""

from uuid import UUID, uuid4

import pytest

from millpond import Ack, Message, Nack, Reject
from millpond.control import Control
from tests.cli.conftest import Cli, published, settled, with_store

pytestmark = pytest.mark.long_on_servers  # they call rooms, which are tested on servers


def failed(url: str, count: int, reason: str = "no stock", queue: str = "orders") -> list[str]:
    published(url, [Message(queue=queue, payload=b"%d" % n, key="k", headers={"a": 1}) for n in range(count)])
    return settled(url, queue, lambda claim: Reject(claim.receipt, reason))


def stats(cli: Cli, queue: str = "orders") -> dict[str, int]:
    counts: dict[str, int] = cli.ok("stats", queue, "--json").json["queues"][queue]
    return counts


# --- retry ------------------------------------------------------------------------------------------


def test_retry_by_id_publishes_a_failed_message_again(cli: Cli, url: str) -> None:
    (id_,) = failed(url, 1)
    output = cli.ok("retry", id_, "--json").json
    (new,) = output["published"]
    assert new != id_ and output == {"published": [new], "due_now": [], "already_retried": [], "skipped": {}}
    again = cli.ok("show", new, "--json").json
    assert (again["state"], again["body"], again["key"], again["deliveries"]) == ("PENDING", 0, "k", 0)
    assert again["headers"] == {"a": 1, "replay-of": id_}
    assert (stats(cli)["PENDING"], stats(cli)["FAILED"], stats(cli)["retried"]) == (1, 0, 1), "the archived row stays"
    assert cli.ok("show", id_, "--json").json["retried"] is True


def test_retry_twice_is_harmless(cli: Cli, url: str) -> None:
    ids = failed(url, 3)
    first, *new = cli.ok("retry", *ids).out.splitlines()
    assert first == "3 published again"
    rows = [cli.ok("show", line.removeprefix("new id: "), "--json").json for line in new]
    assert {row["headers"]["replay-of"] for row in rows} == {*ids}
    assert cli.ok("retry", *ids).out == "3 already retried\n"
    assert stats(cli)["PENDING"] == 3


def test_retry_stays_harmless_when_the_dedupe_window_has_passed(cli: Cli, url: str) -> None:
    (id_,) = failed(url, 1)
    with_store(url, lambda store: store.operations.replay([UUID(id_)], name="retry"), dedupe_for=0)
    settled(url, "orders", lambda claim: Ack(claim.receipt))
    assert cli.ok("retry", id_).out == "1 already retried\n"
    assert stats(cli)["PENDING"] == 0


def test_retry_stays_harmless_when_the_copy_was_purged(cli: Cli, url: str) -> None:
    (id_,) = failed(url, 1)
    with_store(url, lambda store: Control(store).retry([UUID(id_)]), dedupe_for=0)
    settled(url, "orders", lambda claim: Ack(claim.receipt))
    assert cli.ok("purge", "orders", "--older-than", "0s", "--state", "completed").out == "1 purged\n"
    assert cli.ok("retry", id_).out == "1 already retried\n"
    assert cli.ok("retry", "--queue", "orders").out == "1 already retried\n"
    assert stats(cli)["PENDING"] == 0


def test_a_retried_message_that_fails_again_can_be_retried_again(cli: Cli, url: str) -> None:
    failed(url, 1)
    cli.ok("retry", "--queue", "orders")
    settled(url, "orders", lambda claim: Reject(claim.receipt, "no stock"))
    assert cli.ok("retry", "--queue", "orders").out == "1 published again\n1 already retried\n"


def test_retry_a_queue_or_a_reason(cli: Cli, url: str) -> None:
    failed(url, 3)
    failed(url, 2, "too late")
    failed(url, 1, queue="mails")
    assert cli.ok("retry", "--queue", "orders", "--reason", "too late").out == "2 published again\n"
    assert cli.ok("retry", "--queue", "orders").out == "3 published again\n2 already retried\n"
    assert "no queue 'nothing'" in cli.fails(1, "retry", "--queue", "nothing")


def test_retry_by_key_text_and_time(cli: Cli, url: str) -> None:
    failed(url, 3)
    published(url, [Message(queue="orders", payload=b"other", key="l")])
    settled(url, "orders", lambda claim: Reject(claim.receipt, "no stock"))
    assert cli.ok("retry", "--queue", "orders", "--until", "2020-01-01T00:00:00Z").out == "0 published again\n"
    assert cli.ok("retry", "--queue", "orders", "--key", "l", "--preview").out == "1 would be retried\n"
    assert cli.ok("retry", "--queue", "orders", "--key", "l").out == "1 published again\n"
    assert cli.ok("retry", "--queue", "orders", "--text", "2").out == "1 published again\n"
    assert cli.ok("retry", "--queue", "orders", "--since", "2020-01-01T00:00:00Z").out.startswith("2 published again")
    assert "leave them out with ids" in cli.fails(2, "retry", str(uuid4()), "--key", "l")


def test_retry_many_pages(cli: Cli, url: str) -> None:
    for _ in range(3):
        failed(url, 900)
    assert cli.ok("retry", "--queue", "orders").out == "2700 published again\n"
    assert stats(cli)["PENDING"] == 2700


def test_retry_makes_a_retryable_message_due_now(cli: Cli, url: str) -> None:
    published(url, [Message(queue="orders", payload=b"1")])
    (id_,) = settled(url, "orders", lambda claim: Nack(claim.receipt, delay=3600))
    assert settled(url, "orders", lambda claim: Ack(claim.receipt)) == []
    assert cli.ok("retry", id_).out == "1 due now\n"
    assert settled(url, "orders", lambda claim: Ack(claim.receipt)) == [id_]


def test_retry_skips_other_messages_with_a_reason(cli: Cli, url: str) -> None:
    (bad,) = failed(url, 1)
    published(url, [Message(queue="orders", payload=b"1")])
    (completed,) = settled(url, "orders", lambda claim: Ack(claim.receipt))
    (pending,) = published(url, [Message(queue="orders", payload=b"1")])
    missing = str(uuid4())
    output = cli.ok("retry", bad, completed, pending, missing, "--json").json
    assert len(output["published"]) == 1
    assert output["skipped"] == {
        completed: "it is COMPLETED",
        pending: "it is PENDING",
        missing: "there is no such message",
    }
    output = cli("retry", missing)
    assert output.code == 1 and output.err == "millpond: no message was retried; the reasons are above\n"


def test_retry_needs_ids_or_a_queue(cli: Cli, url: str) -> None:
    for args in ([], ["--reason", "r"]):
        assert "give ids, or --queue" in cli.fails(2, "retry", *args)
    assert "give ids or --queue, not both" in cli.fails(2, "retry", str(uuid4()), "--queue", "q")
    assert "leave them out with ids" in cli.fails(2, "retry", str(uuid4()), "--reason", "r")


# --- replay -----------------------------------------------------------------------------------------


def test_replay_publishes_archived_messages_again_under_a_name(cli: Cli, url: str) -> None:
    published(url, [Message(queue="orders", payload=b"1") for _ in range(3)])
    ids = settled(url, "orders", lambda claim: Ack(claim.receipt))
    assert cli.ok("replay", ids[0], "--name", "fix-1").out == "1 published\n"
    assert cli.ok("replay", "--queue", "orders", "--name", "fix-1").out == "2 published\n", "one is already published"
    assert cli.ok("replay", "--queue", "orders", "--name", "fix-1").out == "0 published\n"
    assert cli.ok("replay", "--queue", "orders", "--name", "fix-2", "--to", "other", "--json").json["published"]
    assert (stats(cli)["PENDING"], stats(cli, "other")["PENDING"]) == (3, 3)


def test_replay_chooses_by_state_and_time(cli: Cli, url: str) -> None:
    failed(url, 2)
    published(url, [Message(queue="orders", payload=b"1")])
    settled(url, "orders", lambda claim: Ack(claim.receipt))
    queue = ("--queue", "orders", "--name")
    assert cli.ok("replay", *queue, "a", "--until", "2020-01-01T00:00:00Z").out == "0 published\n"
    assert (
        cli.ok("replay", *queue, "b", "--since", "2020-01-01T00:00:00Z", "--state", "completed").out == "1 published\n"
    )
    assert cli.ok("replay", *queue, "c").out == "3 published\n"


def test_replay_needs_a_name_and_ids_or_a_queue(cli: Cli, url: str) -> None:
    assert "--name" in cli.fails(2, "replay", str(uuid4()))
    assert "give ids, or --queue" in cli.fails(2, "replay", "--name", "x")
    assert "give ids or --queue, not both" in cli.fails(2, "replay", str(uuid4()), "--queue", "q", "--name", "x")
    assert "leave them out with ids" in cli.fails(2, "replay", str(uuid4()), "--name", "x", "--state", "failed")


# --- reschedule, cancel, pause, resume, retain, purge -------------------------------------------------------


def test_reschedule(cli: Cli, url: str) -> None:
    ids = published(url, [Message(queue="orders", payload=b"%d" % n, delay=3600) for n in range(2)])
    assert cli.ok("reschedule", *ids, "--priority", "5", "--delay", "0").out == "2 rescheduled\n"
    assert cli.ok("show", ids[0], "--json").json["priority"] == 5
    cli.ok("reschedule", ids[1], "--due-at", "2999-01-31T08:00:00Z", "--attempts", "3")
    shown = cli.ok("show", ids[1], "--json").json
    assert (shown["due_at"], shown["attempts"]) == ("2999-01-31T08:00:00Z", 3)
    assert settled(url, "orders", lambda claim: Ack(claim.receipt)) == [ids[0]]
    assert cli.ok("reschedule", *ids, "--delay", "1h").out == "1 rescheduled of 2; the others are not waiting\n"
    output = cli("reschedule", ids[0], "--delay", "1h")
    assert output.code == 1 and "none of these messages is waiting" in output.err
    assert "--priority" in cli.fails(2, "reschedule", ids[0])


def test_cancel(cli: Cli, url: str) -> None:
    ids = published(url, [Message(queue="orders", payload=b"1") for _ in range(2)])
    assert cli.ok("cancel", ids[0], "--reason", "customer left", "--json").json == {"cancelled": [ids[0]]}
    shown = cli.ok("show", ids[0], "--json").json
    assert (shown["state"], shown["reason"], shown["attempts"]) == ("FAILED", "customer left", 0)
    assert settled(url, "orders", lambda claim: Ack(claim.receipt)) == [ids[1]]
    assert cli("cancel", ids[1]).code == 1


def test_pause_and_resume(cli: Cli, url: str) -> None:
    ids = published(url, [Message(queue="orders", payload=b"1")])
    assert cli.ok("pause", "orders").out == "paused orders\n"
    assert stats(cli)["paused"] is True
    assert settled(url, "orders", lambda claim: Ack(claim.receipt)) == []
    assert cli.ok("resume", "orders", "--json").json == {"queue": "orders", "paused": False}
    assert settled(url, "orders", lambda claim: Ack(claim.receipt)) == ids


def test_purge(cli: Cli, url: str) -> None:
    failed(url, 2)
    failed(url, 1, queue="mails")
    published(url, [Message(queue="orders", payload=b"1")])
    settled(url, "orders", lambda claim: Ack(claim.receipt))
    published(url, [Message(queue="orders", payload=b"live")])
    assert cli.ok("purge", "--older-than", "7d").out == "0 purged\n"
    assert cli.ok("purge", "orders", "--older-than", "0s", "--state", "completed", "--json").json == {"purged": 1}
    assert cli.ok("purge", "orders", "--older-than", "0s").out == "2 purged\n"
    assert cli.ok("purge", "--older-than", "0").out == "1 purged\n"
    assert (stats(cli)["PENDING"], stats(cli)["FAILED"]) == (1, 0)
    assert "7d" in cli.fails(2, "purge", "--older-than", "a week")
    text = "purge takes the states COMPLETED and FAILED, not PENDING"
    assert text in cli.fails(2, "purge", "--state", "pending")


def test_purge_by_retention(cli: Cli, url: str) -> None:
    failed(url, 2)
    assert cli.ok("purge").out == "0 purged\n", "kept for ever without a retention"
    assert cli.ok("retain", "orders", "--failed", "7d").out == "orders keeps COMPLETED permanently, FAILED for 7d\n"
    assert cli.ok("purge").out == "0 purged\n", "not yet"
    output = cli.ok("retain", "orders", "--completed", "1h", "--failed", "0s", "--json").json
    assert output == {"queue": "orders", "completed": 3600.0, "failed": 0.0}
    assert cli.ok("purge").out == "2 purged\n"


def test_retention_can_be_removed(cli: Cli, url: str) -> None:
    failed(url, 2)
    cli.ok("retain", "orders", "--failed", "0s")
    assert cli.ok("retain", "orders", "--json").json == {"queue": "orders", "completed": None, "failed": None}
    assert cli.ok("purge").out == "0 purged\n"
    assert "7d" in cli.fails(2, "retain", "orders", "--failed", "a week")
