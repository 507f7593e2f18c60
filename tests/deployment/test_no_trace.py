"""No row stays for ids that Millpond made, and settled messages that are not kept."""

from typing import Any

import pytest

import millpond
from millpond import Ack, GiveBack, Message, Reject
from millpond.errors import DataRefused
from tests.shared import KINDS, empty_database
from tests.triggers import execute


@pytest.fixture(params=KINDS)
def url(request: pytest.FixtureRequest) -> str:
    return empty_database(request, request.param)


@pytest.mark.parametrize("outcome", [Ack, Reject])
async def test_a_repeated_settle_without_a_row(url: str, outcome: Any) -> None:
    """It is refused like a stale one, unless the caller says that it is a repeat."""
    store = await millpond.connect(url, migrate=True)
    await store.publish([Message(queue="q", payload=b"x")])
    (claim,) = await store.claim(["q"])
    settled = [outcome(claim.receipt, keep=False)]
    assert await store.settle(settled) == []
    assert execute(url, "SELECT count(*) FROM millpond_archive") == [(0,)]
    assert await store.settle(settled) == [claim.receipt]
    assert await store.settle(settled, again=True) == []
    await store.close()


async def test_ids_that_millpond_makes_are_not_remembered(url: str) -> None:
    """Nothing is looked up for them when they are published."""
    store = await millpond.connect(url, migrate=True)
    await store.publish([Message(queue="q", payload=b"x") for _ in range(3)])
    assert execute(url, "SELECT count(*) FROM millpond_dedupe") == [(0,)]
    await store.publish([Message(queue="q", payload=b"x", id=millpond.id_from("order-7"))])
    assert execute(url, "SELECT count(*) FROM millpond_dedupe") == [(1,)]
    await store.close()


@pytest.mark.parametrize("keep", [True, False])
async def test_outcomes_beside_one_that_is_refused(url: str, keep: bool) -> None:
    """On PostgreSQL each part of a settle is committed alone: those before the error were written, and not stale."""
    store = await millpond.connect(url, migrate=True)
    await store.publish([Message(queue="q", payload=b"x") for _ in range(3)])
    acked, bad, given_back = [claim.receipt for claim in await store.claim(["q"], 3)]
    outcomes = [Ack(acked, keep=keep), Reject(bad, "bad"), GiveBack(given_back)]
    if url.startswith("sqlite"):
        refusing = "CREATE TRIGGER no BEFORE INSERT ON millpond_archive WHEN NEW.state = 'FAILED' "
        refusing += "BEGIN SELECT RAISE(ABORT, 'no'); END"
    else:
        refusing = "ALTER TABLE millpond_archive ADD CONSTRAINT refusing CHECK (state <> 'FAILED')"
    execute(url, refusing)
    try:
        with pytest.raises(DataRefused) as refused:
            await store.settle(outcomes)
        assert (refused.value.receipts, refused.value.refused) == ((bad,), ())
        assert execute(url, "SELECT state FROM millpond_message ORDER BY state") == [("PENDING",), ("PROCESSING",)]
    finally:
        await store.close()
        if not url.startswith("sqlite"):  # the database is shared
            execute(url, "ALTER TABLE millpond_archive DROP CONSTRAINT refusing")
