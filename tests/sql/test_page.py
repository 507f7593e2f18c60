"""The examples of docs/how-to/sql.md run with the databases' command lines."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

import millpond
from millpond import Ack, Message, Reject
from millpond.errors import DataRefused
from tests.sql.shells import run_shell
from tests.triggers import execute, id_literal

PAGE = (Path(__file__).parent.parent.parent / "docs/how-to/sql.md").read_text()
NAMES = {"postgres": "postgresql", "mariadb": "mysql", "sqlite": "sqlite"}
_BLOCK = re.compile(r"^```sql ([a-z ]+)\n(.*?)^```$", re.S | re.M)


def examples(kind: str) -> list[str]:
    return [code for names, code in _BLOCK.findall(PAGE) if NAMES[kind] in names.split()]


@pytest.fixture(params=NAMES)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
async def url(kind: str, request: pytest.FixtureRequest) -> str:
    url = str(request.getfixturevalue(f"{kind}_url"))
    await (await millpond.connect(url, migrate=True)).close()
    return url


async def test_the_examples_run_in_their_order(url: str, kind: str) -> None:
    found = examples(kind)
    assert len(found) >= 4
    for code in found:
        run_shell(url, code)


async def test_handlers_take_the_bodies_of_the_page(url: str, kind: str) -> None:
    run_shell(url, examples(kind)[0])
    pond = millpond.Millpond(url)
    got: list[Any] = []

    @pond.subscriber("orders")
    async def ship(body: Any) -> None:
        got.append(body)

    operations = (await pond.transport).operations
    await operations.reschedule([row.id for row in await operations.browse("orders")], delay=0)
    await pond.run(until_idle=True, signals=False)
    await pond.close()
    assert sorted(got, key=str) == ["it's text", {"sku": 7}, {"sku": 8}]


async def test_own_columns_are_kept_by_the_archive(url: str, kind: str) -> None:
    (columns,) = [code for code in examples(kind) if "ADD COLUMN customer" in code]
    run_shell(url, columns)
    store = await millpond.connect(url)
    await store.publish([Message(queue="q", payload=b"x", headers={"customer": f"c{n}"}) for n in range(30)])
    assert execute(url, "SELECT count(*) FROM millpond_message WHERE customer = 'c7'") == [(1,)]
    claims = await store.claim(["q"], limit=30)
    settled = [Ack(claim.receipt) for claim in claims[1:]]
    assert await store.settle([*settled, Reject(claims[0].receipt)]) == []
    found: Any = execute(url, "SELECT customer FROM millpond_archive ORDER BY id")
    assert sorted(customer for (customer,) in found) == sorted(f"c{n}" for n in range(30))
    await store.close()


@pytest.fixture(params=["postgres", "mariadb"])
async def server_url(request: pytest.FixtureRequest) -> str:
    url = str(request.getfixturevalue(f"{request.param}_url"))
    await (await millpond.connect(url, migrate=True)).close()
    return url


async def test_a_foreign_key_to_a_message_holds_up_no_other_message(server_url: str) -> None:
    """The page forbids it. Such a message cannot be settled; the error names it and the other table."""
    store = await millpond.connect(server_url)
    kind = "uuid" if server_url.startswith("postgres") else "BINARY(16)"
    execute(server_url, f"CREATE TABLE note (message {kind}, FOREIGN KEY (message) REFERENCES millpond_message (id))")
    published = await store.publish([Message(queue="q", payload=b"%d" % n) for n in range(5)])
    for one in published[1:3]:
        execute(server_url, f"INSERT INTO note VALUES ({id_literal(server_url, one.id)})")
    claims = await store.claim(["q"], limit=5)
    stale = millpond.Receipt(claims[4].receipt.id, claims[4].receipt.token + 1)
    with pytest.raises(DataRefused, match="note") as refused:
        await store.settle([Ack(receipt) for receipt in [*(claim.receipt for claim in claims), stale]])
    assert set(refused.value.receipts) == {claim.receipt for claim in claims[1:3]}
    assert refused.value.refused == (stale,)
    assert str(published[1].id) in str(refused.value)
    assert len(await store.operations.archived("q")) == 3
    execute(server_url, "DROP TABLE note")
    assert await store.settle([Ack(claim.receipt) for claim in claims]) == []
    await store.close()
