"""In-process hints of a store stay small, however many queues exist."""

from millpond import Message
from millpond.message import draft
from millpond.transports.database.messages.hints import Hints
from millpond.transports.database.sqlite.dialect import SqliteDialect


def test_queues_that_are_never_claimed_here_are_not_kept() -> None:
    hints = Hints(SqliteDialect())
    hints.lanes_of("claimed")
    for n in range(5000):
        hints.published([draft(Message(queue=f"published-{n}", payload=b""))])
        hints.notified(f"announced-{n}")
        hints.due_again([f"due-{n}"])
        if n == 0:
            hints.published([draft(Message(queue="claimed", payload=b""))])
    assert len(hints.fresh) <= 1001
    assert "claimed" in hints.fresh


def test_queues_that_were_claimed_long_ago_are_not_kept() -> None:
    hints = Hints(SqliteDialect())
    often = hints.lanes_of("often")
    for n in range(5000):
        hints.lanes_of(f"once-{n}")
        hints.notified(f"once-{n}")
        if n % 100 == 0:
            assert hints.lanes_of("often") is often
    assert len(hints.lanes) <= 1000
    assert len(hints.fresh) <= 2001
    assert "once-4999" in hints.lanes
