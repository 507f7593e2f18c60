"""The lists of docs/how-to/rights.md, with real accounts: each role can do its work, and no more."""

from __future__ import annotations

import re
import secrets
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit, urlunsplit
from uuid import UUID, uuid4

import pytest

import millpond
from millpond import Ack, Message, Millpond, State
from millpond.control import Control
from millpond.errors import MissingRight
from servers import MariaDB, Postgres
from tests.sql.client import MysqlCalls, PostgresCalls
from tests.sql.shells import run_shell
from tests.triggers import execute
from tests.worker.conftest import drained, working

PAGE = (Path(__file__).parent.parent.parent / "docs/how-to/rights.md").read_text()
ROLES = ("publisher", "replacer", "worker", "operator", "reader")
_LIST = re.compile(r"^```sql (\w+) (\w+)\n(.*?)^```$", re.S | re.M)
LISTS = {(database, role): text for database, role, text in _LIST.findall(PAGE)}
for database in ("postgresql", "mysql"):  # a publisher with one right more
    both = LISTS[database, "publisher"] + LISTS[database, "replacer"]
    LISTS[database, "replacer"] = both.replace("TO publisher", "TO replacer")


class Accounts:
    """A database whose owner has granted each role its list."""

    def __init__(self, url: str, kind: str) -> None:
        self.url = url
        self._suffix, self._password = uuid4().hex[:8], secrets.token_hex(8)
        database = urlsplit(url).path[1:]
        self._database = "postgresql" if kind == "postgres" else "mysql"
        for role in ROLES:
            name = f"{role}_{self._suffix}"
            if kind == "postgres":
                execute(url, f"CREATE ROLE {name} LOGIN PASSWORD '{self._password}'")
                grants = re.sub(rf"\b{role}\b", name, LISTS["postgresql", role])
            else:
                execute(url, f"CREATE USER '{name}'@'%' IDENTIFIED BY '{self._password}'")
                grants = re.sub(rf"\bTO {role}\b", f"TO '{name}'@'%'", LISTS["mysql", role])
                grants = grants.replace("shop.", f"`{database}`.")
            run_shell(url, grants)

    def of(self, role: str) -> str:
        parts = urlsplit(self.url)
        return urlunsplit(
            parts._replace(netloc=f"{role}_{self._suffix}:{self._password}@{parts.hostname}:{parts.port}")
        )

    def drop(self) -> None:
        for role in ROLES:
            name = f"{role}_{self._suffix}"
            if self._database == "postgresql":
                execute(self.url, f"DROP OWNED BY {name}", f"DROP ROLE {name}")
            else:
                execute(self.url, f"DROP USER '{name}'@'%'")


@pytest.fixture(scope="module", params=["postgres", "mariadb"])
def accounts(request: pytest.FixtureRequest) -> Iterator[Accounts]:
    server: Postgres | MariaDB = request.getfixturevalue(f"{request.param}_server")
    name = f"rights_{uuid4().hex[:8]}"
    url = server.create_database(name)
    run_shell(url, _printed(url))
    accounts = Accounts(url, request.param)
    yield accounts
    accounts.drop()
    server.drop_database(name)


def _printed(url: str) -> str:
    command = [sys.executable, "-m", "millpond", "migrate", url, "--sql"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def _calls(url: str) -> Any:
    return PostgresCalls(url) if url.startswith("postgres") else MysqlCalls(url)


async def test_a_publisher_publishes_and_reads_no_body(accounts: Accounts) -> None:
    url = accounts.of("publisher")
    store = await millpond.connect(url)
    given = uuid4()
    assert [p.new for p in await store.publish([Message(queue="p", payload=b"secret", id=given)])] == [True]
    assert [p.new for p in await store.publish([Message(queue="p", payload=b"secret", id=given)])] == [False]
    await store.publish([Message(queue="p", payload=b"secret")])
    await store.publish([Message(queue="p", payload=b"secret", headers={"n": n}) for n in range(50)])
    run_shell(
        url, f"INSERT INTO millpond_publish (queue, body, id) VALUES ('p', 'secret', '{uuid4()}'), ('p', 'x', NULL);"
    )
    if url.startswith("postgres"):
        printed = run_shell(url, "INSERT INTO millpond_publish (queue, body) VALUES ('p', 'x') RETURNING id;")
        assert UUID(printed.strip())
    calls = _calls(url)
    calls.call("publish", "p", "by function", *[None] * 8)
    calls.connection.close()
    for refused in ("SELECT payload FROM millpond_message", "SELECT headers FROM millpond_message"):
        assert "denied" in run_shell(url, f"{refused};", fails=True)
    for view in ("millpond_message_view", "millpond_archive_view", "millpond_archive"):
        assert "denied" in run_shell(url, f"SELECT * FROM {view};", fails=True)
    with pytest.raises(MissingRight, match="millpond_"):
        await store.claim(["p"])
    await store.close()


async def test_a_publisher_publishes_unique_messages(accounts: Accounts) -> None:
    store = await millpond.connect(accounts.of("publisher"))
    replacer = await millpond.connect(accounts.of("replacer"))

    async def result(store: millpond.Transport, *rule: Any, queue: str = "u") -> str:
        unique = millpond.Unique("v", *rule)
        (published,) = await store.publish([Message(queue=queue, payload=b"1", unique=unique)])
        return published.result

    assert [await result(store) for _ in range(2)] == ["published", "kept"]
    assert [await result(store, "unfinished"), await result(store, 60, "raise")] == ["kept", "refused"]
    for choice in ("replace", "postpone"):
        with pytest.raises(MissingRight, match="millpond_message"):
            await result(store, "waiting", choice)
        assert await result(replacer, "waiting", choice) == f"{choice.removesuffix('e')}ed"
    await store.close()
    await replacer.close()


async def test_a_worker_works(accounts: Accounts) -> None:
    pond = Millpond(accounts.of("worker"))
    handled: list[int] = []
    tried: list[int] = []

    @pond.subscriber("w", max_workers=4)
    async def handle(number: int) -> None:
        tried.append(number)
        if number == 3 and tried.count(3) == 1:
            raise millpond.NackMessage(delay=0)
        if number == 4:
            raise millpond.RejectMessage("no")
        handled.append(number)

    await pond.publish_many("w", range(10))
    async with working(pond):
        assert await drained(pond, "w") == {State.COMPLETED: 9, State.FAILED: 1}
    assert sorted(handled) == [0, 1, 2, 3, 5, 6, 7, 8, 9]
    assert await (await pond.transport).operations.purge("w", older_than=0) == 10
    await pond.close()


async def test_a_worker_by_sql_works(accounts: Accounts) -> None:
    run_shell(accounts.url, "INSERT INTO millpond_publish (queue, body) VALUES ('s', 'x'), ('s', 'y');")
    calls = _calls(accounts.of("worker"))
    (one, two) = calls.call("claim", "s", 10, 30)
    assert not calls.many("extend", [one[0]], one[1], 60)
    assert not calls.many("ack", [one[0]], one[1])
    assert not calls.many("nack", [two[0]], two[1], None, "later")
    calls.connection.close()


async def test_only_the_owner_sets_the_time(accounts: Accounts) -> None:
    """The functions have the owner's rights: a consumer that may set their clock could hide messages from an export."""
    run_shell(accounts.url, "INSERT INTO millpond_publish (queue, body) VALUES ('t', 'x');")
    calls = _calls(accounts.of("worker"))
    calls.set_time(1_000_000)
    ((id_, token, *_),) = calls.call("claim", "t", 10, 30)
    assert not calls.many("ack", [id_], token)
    ((archived,),) = execute(accounts.url, "SELECT archived_at FROM millpond_archive WHERE queue = 't'")
    assert archived > 1_700_000_000_000_000
    calls.connection.close()


async def test_a_publisher_changes_no_message_of_others(accounts: Accounts) -> None:
    url = accounts.of("publisher")
    for column in ("deliveries", "state", "due_at", "queue", "payload"):
        assert "denied" in run_shell(url, f"UPDATE millpond_message SET {column} = NULL;", fails=True)
    assert "denied" in run_shell(url, "DELETE FROM millpond_message;", fails=True)


async def test_an_operator_operates(accounts: Accounts) -> None:
    store = await millpond.connect(accounts.of("operator"))
    (published,) = await store.publish([Message(queue="o", payload=b"x")])
    await store.operations.pause("o")
    await store.operations.resume("o")
    await store.operations.reschedule([published.id], priority=3)
    assert await store.operations.cancel([published.id]) == [published.id]
    await store.operations.retain("o", completed=60, failed=60)
    await store.operations.purge("o", older_than=0)
    await store.close()


async def test_a_reader_reads_and_changes_nothing(accounts: Accounts) -> None:
    run_shell(accounts.url, "INSERT INTO millpond_publish (queue, body) VALUES ('r', 'x');")
    store = await millpond.connect(accounts.of("reader"))
    assert [row.payload for row in await store.operations.browse("r")] == [b"x"]
    assert run_shell(accounts.of("reader"), "SELECT body FROM millpond_message_view WHERE queue = 'r';") == "x\n"
    (row,) = await store.operations.browse("r")
    control = Control(store)
    assert [queue.stats.queue for queue in await control.overview(["r"])] == ["r"]
    assert await control.operations.settings(["r"]) and await control.operations.archived("r") == []
    not_checked = [finding.text for finding in await control.doctor() if finding.kind == "not-checked"]
    assert ["PROCESS" in text for text in not_checked] == ([] if accounts.url.startswith("postgres") else [True])
    why = await control.why(row.id)
    assert [reason.kind for reason in why.reasons] == ["no-worker"]
    with pytest.raises(MissingRight, match="millpond_message"):
        await store.publish([Message(queue="r", payload=b"x")])
    with pytest.raises(MissingRight, match="millpond_"):
        await store.claim(["r"])
    with pytest.raises(MissingRight, match="millpond_"):
        await store.operations.pause("r")
    await store.close()


async def test_an_owner_needs_no_grant(accounts: Accounts) -> None:
    store = await millpond.connect(accounts.url)
    await store.publish([Message(queue="owner", payload=b"x")])
    (claim,) = await store.claim(["owner"])
    assert await store.settle([Ack(claim.receipt)]) == []
    await store.close()
