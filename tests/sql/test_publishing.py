"""INSERT INTO millpond_publish with the databases' command lines, and the views for people."""

from __future__ import annotations

from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta
from typing import Any

import psycopg
import pytest

import millpond
from millpond import Ack, Message, State
from tests.shared import KINDS, empty_database
from tests.sql.shells import run_shell
from tests.triggers import execute

ID = "0190f0f0-1234-7abc-8def-ffeeddccbbaa"
TEXTS = [
    "plain",
    '{"sku": 7}',
    "it's \"quoted\" \\ and \\n \\' escaped",
    "two\nlines\tand a tab",
    "\N{WATER WAVE} ü %s :name {braces} $1 $$ -- /* */",
]


@pytest.fixture(params=KINDS)
def url(request: pytest.FixtureRequest) -> str:
    return empty_database(request, request.param)


@pytest.fixture
async def store(url: str) -> AsyncIterator[Any]:
    store = await millpond.connect(url, migrate=True)
    yield store
    await store.close()


def literal(url: str, text: str) -> str:
    quoted = text.replace("'", "''")
    return f"'{quoted}'" if not url.startswith(("mysql", "mariadb")) else "'" + quoted.replace("\\", "\\\\") + "'"


async def test_any_text_arrives_as_it_was_written(url: str, store: Any) -> None:
    for text in TEXTS:
        run_shell(url, f"INSERT INTO millpond_publish (queue, body) VALUES ('q', {literal(url, text)});")
    claims = await store.claim(["q"], limit=10)
    assert [claim.message.payload.decode() for claim in claims] == TEXTS
    assert all(claim.message.id.version == 7 for claim in claims)
    assert await store.settle([Ack(claim.receipt) for claim in claims]) == []


async def test_rows_of_one_statement_keep_their_order(url: str, store: Any) -> None:
    values = ", ".join(f"('q', '{n}')" for n in range(300))
    run_shell(url, f"INSERT INTO millpond_publish (queue, body) VALUES {values};")
    assert [int(claim.message.payload) for claim in await store.claim(["q"], limit=300)] == list(range(300))


def test_ids_of_equal_rows_grow_on_postgresql(request: pytest.FixtureRequest) -> None:
    """The server evaluates a subquery of constants once; random ids would make each row slower to index."""
    url = empty_database(request, "postgres")
    execute(url, "INSERT INTO millpond_publish (queue, body) SELECT 'q', 'x' FROM generate_series(1, 1000)")
    ids = [id_ for (id_,) in execute(url, "SELECT id FROM millpond_message")]
    assert len({id_.hex[:16] for id_ in ids}) > 900
    assert all(id_.version == 7 for id_ in ids)
    ((wrong,),) = execute(
        url,
        "SELECT count(*) FROM millpond_message "
        "WHERE abs(('x' || left(replace(id::text, '-', ''), 12))::bit(48)::bigint - created_at / 1000) > 600000",
    )
    assert wrong == 0


async def test_every_column(url: str, store: Any) -> None:
    soon = (datetime.now(UTC) + timedelta(hours=1)).replace(microsecond=0)
    moment = soon.strftime("%Y-%m-%d %H:%M:%S") + ("+00" if url.startswith("postgres") else "")
    key = "`key`" if url.startswith(("mysql", "mariadb")) else "key"
    run_shell(
        url,
        f"INSERT INTO millpond_publish (queue, body, id, {key}, priority, due_at, expires_at, headers) VALUES "
        f"('q', '1', '{ID}', 'k', 7, '{moment}', '{moment}', '{{\"trace\": \"x\"}}');",
    )
    (row,) = await store.operations.browse("q")
    assert (str(row.id), row.key, row.priority, row.headers) == (ID, "k", 7, {"trace": "x"})
    assert row.due_at == row.expires_at == soon
    assert row.state is State.PENDING


async def test_a_delay_is_in_seconds(url: str, store: Any) -> None:
    run_shell(url, "INSERT INTO millpond_publish (queue, body, delay) VALUES ('q', 'x', 90.5);")
    (row,) = await store.operations.browse("q")
    assert row.due_us - row.created_us == 90_500_000


async def test_bytes_are_taken_as_they_are(url: str, store: Any) -> None:
    value = r"'\x00ff'" if url.startswith("postgres") else "x'00ff'"
    run_shell(url, f"INSERT INTO millpond_publish (queue, payload) VALUES ('q', {value});")
    assert [claim.message.payload for claim in await store.claim(["q"])] == [b"\x00\xff"]


async def test_a_given_id_is_published_once(url: str, store: Any) -> None:
    insert = f"INSERT INTO millpond_publish (queue, body, id) VALUES ('q', 'x', '{ID}');"
    run_shell(url, insert)
    run_shell(url, insert + insert)
    (claim,) = await store.claim(["q"], limit=10)
    await store.settle([Ack(claim.receipt)])
    run_shell(url, insert.replace(ID, ID.upper()))
    assert await store.claim(["q"]) == []
    again = await store.publish([Message(queue="q", payload=b"x", id=claim.receipt.id)])
    assert [published.new for published in again] == [False]


async def test_an_id_that_a_store_published_is_known_to_sql(url: str, store: Any) -> None:
    await store.publish([Message(queue="q", payload=b"x", id=ID)])  # type: ignore[arg-type]
    run_shell(url, f"INSERT INTO millpond_publish (queue, body, id) VALUES ('q', 'x', '{ID}');")
    assert len(await store.claim(["q"], limit=10)) == 1


@pytest.mark.parametrize(
    ("columns", "values", "hint"),
    [
        ("queue, body", "' q', 'x'", "white space"),
        ("queue, body", "'', 'x'", "1 to 255"),
        ("queue", "'q'", "give body"),
        ("queue, body, priority", "'q', 'x', 101", "from 0"),
        ("queue, body, headers", "'q', 'x', '[1]'", "JSON object"),
        ("queue, body, delay", "'q', 'x', -1", "delay"),
        ("queue, body, delay", "'q', 'x', 1e12", "100 years"),
        ("queue, body, id", "'q', 'x', 'order 7'", "uuid"),
    ],
)
async def test_what_no_message_may_have_is_refused(url: str, store: Any, columns: str, values: str, hint: str) -> None:
    error = run_shell(url, f"INSERT INTO millpond_publish ({columns}) VALUES ({values});", fails=True)
    assert hint.lower() in error.lower()
    assert await store.operations.browse("q") == []


FAR = {"postgres": ("4000-01-01 BC", "20000-01-01"), "mysql": ("0000-01-01",), "sqlite": ("-4000-01-01",)}


@pytest.mark.parametrize("column", ["due_at", "expires_at"])
async def test_a_time_that_python_cannot_show_is_refused(url: str, store: Any, column: str) -> None:
    for far in next(times for kind, times in FAR.items() if url.startswith(kind)):
        insert = f"INSERT INTO millpond_publish (queue, body, {column}) VALUES ('q', 'x', '{far}');"
        assert column in run_shell(url, insert, fails=True)
    assert await store.operations.browse("q") == []


async def test_mariadb_without_strict_mode_cuts_no_text(request: pytest.FixtureRequest) -> None:
    url = empty_database(request, "mariadb")
    for columns, values in (
        ("queue, body", "repeat('x', 70000), 'x'"),
        ("queue, body, `key`", "'q', 'x', repeat('x', 256)"),
    ):
        with pytest.raises(Exception, match="255 characters"):
            execute(url, "SET sql_mode = ''", f"INSERT INTO millpond_publish ({columns}) VALUES ({values})")
    execute(url, "SET sql_mode = ''", "INSERT INTO millpond_publish (queue, body) VALUES (repeat('\u00fc', 255), 'x')")
    assert execute(url, "SELECT queue FROM millpond_message") == [("\u00fc" * 255,)]


@pytest.mark.parametrize(("column", "value"), [("headers", '{"a": 1}'), ("key", "k"), ("queue", "q")])
async def test_bytes_in_place_of_text_are_refused_on_sqlite(sqlite_url: str, column: str, value: str) -> None:
    store: Any = await millpond.connect(sqlite_url)
    values = {"queue": "'q'", "body": "'x'", column: f"x'{value.encode().hex()}'"}
    insert = f"INSERT INTO millpond_publish ({', '.join(values)}) VALUES ({', '.join(values.values())});"
    assert column in run_shell(sqlite_url, insert, fails=True)
    assert await store.operations.browse() == []
    await store.close()


HEADERS = {
    "half a pair": r'{"a": "\ud800"}',
    "long": f'{{"a": {"1" * 5000}}}',
    "deep": f'{{"a": {"[" * 70}{"]" * 70}}}',
}


@pytest.mark.parametrize("headers", HEADERS.values(), ids=HEADERS)
async def test_headers_that_only_the_database_reads_fail_alone(url: str, store: Any, headers: str) -> None:
    """As in docs/how-to/sql.md. MariaDB reads long numbers only."""
    insert = f"INSERT INTO millpond_publish (queue, body, headers) VALUES ('q', 'x', {literal(url, headers)});"
    if url.startswith(("mysql", "mariadb")) and headers != HEADERS["long"]:
        assert "headers" in run_shell(url, insert, fails=True)
        return
    run_shell(url, insert)
    run_shell(url, "INSERT INTO millpond_publish (queue, body) VALUES ('q', 'good');")
    assert [claim.message.payload for claim in await store.claim(["q"], limit=10)] == [b"good"]
    (row,) = await store.operations.archived("q")
    assert (row.state, row.reason) == (State.FAILED, "undecodable headers")


async def test_the_ids_that_returning_gives(url: str, store: Any) -> None:
    """As docs/how-to/sql.md says, MySQL apart, which has no RETURNING."""
    (shown,) = execute(url, "INSERT INTO millpond_publish (queue, body) VALUES ('q', 'x') RETURNING id")
    (claim,) = await store.claim(["q"])
    assert [str(value) for value in shown] == ["None" if url.startswith("sqlite") else str(claim.receipt.id)]


async def test_a_rolled_back_insert_publishes_nothing(url: str, store: Any) -> None:
    run_shell(url, f"BEGIN; INSERT INTO millpond_publish (queue, body, id) VALUES ('q', 'x', '{ID}'); ROLLBACK;")
    assert await store.claim(["q"]) == []
    assert (await store.publish([Message(queue="q", payload=b"x", id=ID)]))[0].new  # type: ignore[arg-type]


async def test_the_views_show_what_people_write(url: str, store: Any) -> None:
    await store.publish(
        [Message(queue="q", payload=b'{"a": 1}', headers={"h": "x"}, id=ID)]  # type: ignore[arg-type]
    )
    (created,) = [row.created_at for row in await store.operations.browse("q")]
    shown = run_shell(url, "SELECT id, state, body, headers, created_at FROM millpond_message_view;")
    id_, state, body, headers, at = shown.strip().split("\t")
    assert (id_, state, body, headers.replace(" ", "")) == (ID, "PENDING", '{"a": 1}', '{"h":"x"}')
    assert at.startswith(created.strftime("%Y-%m-%d %H:%M:%S"))
    (claim,) = await store.claim(["q"])
    await store.settle([Ack(claim.receipt)])
    shown = run_shell(url, "SELECT id, state, body, attempts FROM millpond_archive_view;")
    assert shown.strip().split("\t") == [ID, "COMPLETED", '{"a": 1}', "1"]


async def test_a_body_that_is_no_text_is_null_in_the_views(url: str, store: Any) -> None:
    texts = ["ü", "\N{WATER WAVE}", "\N{EURO SIGN}" * 300, "plain", ""]
    wrong = [
        b"\x00\xff",
        b"\xff",
        b"\xc3",
        b"\xc3\xa9\xa9",
        b"\xed\xa0\x80",
        b"\xf4\x90\x80\x80",
        b"x" * 300 + b"\xe2\x82",
    ]
    await store.publish([Message(queue="q", payload=body) for body in [*(text.encode() for text in texts), *wrong]])
    for state, view in (("waiting", "millpond_message_view"), ("settled", "millpond_archive_view")):
        if state == "settled":
            await store.settle([Ack(claim.receipt) for claim in await store.claim(["q"], limit=100)])
        shown = execute(url, f"SELECT body, payload FROM {view} ORDER BY id")
        assert [(body, bytes(payload)) for body, payload in shown] == [
            *((text, text.encode()) for text in texts),
            *((None, body) for body in wrong),
        ]


async def test_an_insert_wakes_waiting_workers_on_postgresql(request: pytest.FixtureRequest) -> None:
    url = empty_database(request, "postgres")
    store = await millpond.connect(url)
    with psycopg.connect(url, autocommit=True) as listener:
        listener.execute(f"LISTEN {store.dialect.channel}")
        run_shell(url, "INSERT INTO millpond_publish (queue, body) SELECT 'q', n::text FROM generate_series(1, 50) n;")
        assert [notice.payload for notice in listener.notifies(timeout=60, stop_after=1)] == ["q"]
        for columns, values in (("delay", "60"), ("due_at", "now()"), ("id", f"'{ID}'")):
            run_shell(
                url, f"INSERT INTO millpond_publish (queue, body, {columns}) VALUES ('{columns}', 'x', {values});"
            )
            assert [notice.payload for notice in listener.notifies(timeout=60, stop_after=1)] == [columns]
    await store.close()
