"""SQL functions beside a Python worker, in a caller's transaction, with hostile callers and after many failures."""

from __future__ import annotations

import asyncio
import json
import threading
from functools import partial
from typing import Any
from uuid import uuid4

import psycopg
import pymysql
import pytest

import millpond
from millpond import Message, Millpond, Retry, State
from servers import Postgres
from tests.conformance.messages import counts
from tests.shared import empty_database
from tests.sql.client import Calls, MysqlCalls, PostgresCalls
from tests.sql.shells import run_shell
from tests.triggers import execute
from tests.waiting import mariadb_waits, until
from tests.worker.conftest import drained, working

SERVERS = ["postgres", "mariadb"]


def calls_of(url: str) -> Calls:
    return PostgresCalls(url) if url.startswith("postgres") else MysqlCalls(url)


@pytest.fixture(params=SERVERS)
def url(request: pytest.FixtureRequest) -> str:
    return empty_database(request, request.param)


async def test_a_sql_consumer_and_a_python_worker_share_a_queue(url: str) -> None:
    """Both nack half of the messages once. Nothing is lost or handled twice."""
    pond = Millpond(url)
    by_worker: list[int] = []
    by_sql: list[int] = []
    once: set[int] = set()
    stop = threading.Event()

    @pond.subscriber("q", max_workers=4)
    async def handle(number: int) -> None:
        await asyncio.sleep(0.002)
        if number % 2 and number not in once:
            once.add(number)
            raise millpond.NackMessage(delay=0)
        by_worker.append(number)

    def consume() -> None:
        calls = calls_of(url)
        while not stop.is_set():
            rows = calls.call("claim", "q", 3, 30)
            for id_, token, body, *_ in rows:
                number = int(body)
                if number % 2 and number not in once:
                    once.add(number)
                    assert not calls.many("nack", [id_], token, 0.0, "once more")
                else:
                    by_sql.append(number)
                    assert not calls.many("ack", [id_], token)
            if not rows:
                stop.wait(0.01)
        calls.connection.close()

    await pond.publish_many("q", range(400))
    consumer = threading.Thread(target=consume)
    consumer.start()
    try:
        async with working(pond):
            assert await drained(pond) == {State.COMPLETED: 400}
    finally:
        stop.set()
        consumer.join()
    assert sorted(by_worker + by_sql) == list(range(400))
    assert by_worker and by_sql
    await pond.close()


async def test_nacks_without_a_delay_wait_longer_each_time_and_end_as_failed(url: str) -> None:
    store = await millpond.connect(url)
    await store.publish([Message(queue="q", payload=b"x")])
    calls = calls_of(url)
    waits, at = [], 1_800_000_000_000_000
    for _ in range(8):
        calls.set_time(at := at + 10**9)
        ((id_, token, *_),) = calls.call("claim", "q", 1, 30)
        assert not calls.many("nack", [id_], token, None, "no luck")
        waits += [row.due_us - at for row in await store.operations.browse("q", states=[State.RETRYABLE])]
    assert [round(wait / 10**6 / 2**n, 2) for n, wait in enumerate(waits)] == pytest.approx([1] * 7, abs=0.34)
    (failed,) = await store.operations.archived("q")
    assert (failed.reason, failed.error, failed.attempts) == ("retries used up", "no luck", 8)
    assert not calls.many("nack", [id_], token, None, "no luck")  # the same again, after a lost reply
    calls.connection.close()
    await store.close()


async def test_a_nack_without_a_delay_obeys_the_settings_of_the_queue(url: str) -> None:
    store = await millpond.connect(url)
    execute(
        url,
        "INSERT INTO millpond_queue (name, lease, max_deliveries, retry_initial, retry_multiplier, retry_jitter, "
        "retry_attempts) VALUES ('q', 7000000, 0, 2000000, 1, 0, 2)",
    )
    await store.publish([Message(queue="q", payload=b"x")])
    calls = calls_of(url)
    calls.set_time(at := 1_800_000_000_000_000)
    ((id_, token, *_),) = calls.call("claim", "q", 1, None)
    (row,) = await store.operations.browse("q")
    assert row.lease_us == at + 7_000_000
    assert not calls.many("nack", [id_], token, None, "no luck")
    (row,) = await store.operations.browse("q")
    assert row.due_us == at + 2_000_000
    calls.set_time(at + 2_000_000)
    ((id_, token, *_),) = calls.call("claim", "q", 1, None)
    assert not calls.many("nack", [id_], token, None, "no luck")
    (failed,) = await store.operations.archived("q")
    assert (failed.reason, failed.attempts) == ("retries used up", 2)
    execute(url, "UPDATE millpond_queue SET max_deliveries = 1")
    await store.publish([Message(queue="q", payload=b"y")])
    calls.set_time(at + 4_000_000)
    ((id_, token, *_),) = calls.call("claim", "q", 1, None)
    assert not calls.many("nack", [id_], token, 0.0, None)
    assert calls.call("claim", "q", 1, None) == []
    assert {row.reason for row in await store.operations.archived("q")} == {"retries used up", "max_deliveries"}
    calls.connection.close()
    await store.close()


@pytest.mark.parametrize(
    ("policy", "attempts"),
    [
        (Retry(multiplier=1.1, maximum=3600, jitter=0, attempts=None), 60),
        (Retry(multiplier=1.1, maximum=3600, jitter=0, attempts=None), 2_000_000),
        (Retry(multiplier=1e300, maximum=3600, jitter=0, attempts=None, first="immediate"), 2),
        (Retry(initial=0.000001, multiplier=1e12, maximum=3_153_600_000, jitter=0, attempts=None), 1),
        (Retry(multiplier=1, step=2, maximum=3600, jitter=0, attempts=None), 100),
        (Retry(initial=0, step=1, jitter=0, attempts=None), 3),
        (Retry(maximum=0, jitter=0, attempts=None), 3),
    ],
)
async def test_a_nack_by_sql_waits_as_long_as_one_by_python(url: str, policy: Retry, attempts: int) -> None:
    store = await millpond.connect(url)
    await store.operations.configure("q", retry=policy)
    await store.publish([Message(queue="q", payload=b"x")])
    execute(url, f"UPDATE millpond_message SET attempts = {attempts}")
    calls = calls_of(url)
    calls.set_time(at := 1_800_000_000_000_000)
    ((id_, token, *_),) = calls.call("claim", "q", 1, 30)
    assert not calls.many("nack", [id_], token, None, None)
    (row,) = await store.operations.browse("q")
    assert (row.due_us - at) / 10**6 == pytest.approx(policy.delay(attempts + 1))
    calls.connection.close()
    await store.close()


async def test_a_lease_of_nothing_or_of_more_than_a_hundred_years_is_refused(url: str) -> None:
    store = await millpond.connect(url)
    await store.publish([Message(queue="q", payload=b"x")])
    calls = calls_of(url)
    for lease in (0.0, -1.0, 3_153_600_001.0, 9e11):
        with pytest.raises(Exception, match="lease of more than 0 seconds, at most 100 years"):
            calls.call("claim", "q", 1, lease)
    ((id_, token, *_),) = calls.call("claim", "q", 1, 3_153_600_000.0)
    for lease in (-1.0, 3_153_600_001.0, 9e11):
        with pytest.raises(Exception, match="lease of 0 seconds to 100 years"):
            calls.many("extend", [id_], token, lease)
    assert not calls.many("extend", [id_], token, 30.0)
    calls.connection.close()
    await store.close()


async def test_a_delay_of_more_than_a_hundred_years_is_refused(url: str) -> None:
    store = await millpond.connect(url)
    await store.publish([Message(queue="q", payload=b"x")])
    calls = calls_of(url)
    ((id_, token, *_),) = calls.call("claim", "q", 1, 30)
    for delay in (-1.0, 3_153_600_001.0, 1e300):
        for name, *more in (("nack", delay, None), ("give_back", delay)):
            with pytest.raises(Exception, match="delay must be 0 seconds to 100 years"):
                calls.many(name, [id_], token, *more)
    assert not calls.many("nack", [id_], token, 3_153_600_000.0, None)
    calls.connection.close()
    await store.close()


async def test_null_is_the_default_of_every_argument(url: str) -> None:
    """A program that passes NULL for an option that it does not know about loses no message."""
    store = await millpond.connect(url)
    await store.publish([Message(queue="q", payload=b"%d" % n) for n in range(2)])
    calls = calls_of(url)
    keep = [None] if url.startswith("postgres") else []
    (one, token, *_), (two, *_) = calls.call("claim", "q", 2, None)
    assert not calls.many("extend", [one], token, None)
    assert not calls.many("ack", [one], token, *keep)
    assert not calls.many("reject", [two], token, None, None, *keep)
    settled = {row.payload: (row.state, row.reason) for row in await store.operations.archived("q")}
    assert settled == {b"0": (State.COMPLETED, None), b"1": (State.FAILED, "rejected")}
    calls.connection.close()
    await store.close()


def test_no_ids_settle_nothing_on_postgresql(request: pytest.FixtureRequest) -> None:
    calls = calls_of(empty_database(request, "postgres"))
    for name in ("ack", "reject", "nack", "give_back", "extend"):
        for ids in ("NULL", "ARRAY[]::uuid[]"):
            assert calls.connection.execute(f"SELECT millpond_{name}_many({ids}, 1)").fetchall() == []
    calls.connection.close()


@pytest.mark.slow  # 300 MB pass through the server several times
def test_a_body_that_is_too_large_to_be_escaped_holds_up_no_other_message(request: pytest.FixtureRequest) -> None:
    """PostgreSQL writes a byte that is no text in four, and makes no value of more than a gigabyte."""
    calls = calls_of(empty_database(request, "postgres"))
    large = b"\xff" * 270_000_000
    publish = "INSERT INTO millpond_publish (queue, payload) VALUES ('q', %b)"
    for payload in (large, b"small"):
        calls.connection.execute(publish, (payload,))
    found = "SELECT octet_length(payload), body FROM millpond_claim('q', 10)"
    assert calls.connection.execute(found).fetchall() == [(len(large), None), (None, "small")]
    calls.connection.close()


@pytest.mark.parametrize(
    "ids", ["zzz", '["GOOD", "zzz"]', '["GOOD", null]', '["GOOD", 7]', '["GOOD", ["GOOD"]]', "[", None]
)
async def test_an_id_that_is_no_uuid_is_refused_on_mariadb(request: pytest.FixtureRequest, ids: str | None) -> None:
    url = empty_database(request, "mariadb")
    store = await millpond.connect(url)
    await store.publish([Message(queue="q", payload=b"x")])
    calls = calls_of(url)
    ((id_, token, *_),) = calls.call("claim", "q", 1, 30)
    given = None if ids is None else ids.replace("GOOD", id_)
    for name, *more in (("ack",), ("reject", None, None), ("nack", None, None), ("give_back", None), ("extend", 30)):
        with pytest.raises(pymysql.err.OperationalError, match="UUID"):
            calls.call(name, given, token, *more)
    assert (await counts(store)) == {State.PROCESSING: 1}
    assert calls.call("ack", id_, token) == calls.call("ack", f'["{id_}"]', token) == []
    calls.connection.close()
    await store.close()


async def test_a_call_belongs_to_the_callers_transaction(url: str) -> None:
    store = await millpond.connect(url)
    await store.publish([Message(queue="q", payload=b"%d" % n) for n in range(2)])
    calls = calls_of(url)
    if isinstance(calls, MysqlCalls):  # at REPEATABLE READ it would lock the next row too
        _run(calls, "SET SESSION TRANSACTION ISOLATION LEVEL READ COMMITTED")
    _run(calls, "BEGIN")
    ((id_, token, *_),) = calls.call("claim", "q", 1, 30)
    assert not calls.many("ack", [id_], token)
    calls.call("publish", "r", "x", *[None] * 8)
    (other,) = await store.claim(["q"], limit=10)  # the row that the caller has locked is skipped
    assert str(other.receipt.id) != str(id_)
    _run(calls, "ROLLBACK")
    (claim,) = await until(lambda: store.claim(["q"], limit=10))  # a row that was locked is looked for again later
    assert (str(claim.receipt.id), claim.deliveries) == (str(id_), 1)
    assert await store.claim(["r"]) == []
    calls.connection.close()
    await store.close()


async def test_a_failed_call_leaves_the_callers_transaction_as_it_was(url: str) -> None:
    """On PostgreSQL a failed statement ends the transaction; on MySQL the caller goes on, and nothing is half done."""
    store = await millpond.connect(url)
    calls = calls_of(url)
    _run(calls, "BEGIN")
    calls.call("publish", "q", "kept", *[None] * 8)
    if url.startswith("postgres"):
        _run(calls, "SAVEPOINT s")
    with pytest.raises(Exception, match="priority"):
        calls.call("publish", "q", "refused", str(uuid4()), None, 101, *[None] * 5)
    if url.startswith("postgres"):
        _run(calls, "ROLLBACK TO s")
    _run(calls, "COMMIT")
    assert [claim.message.payload for claim in await store.claim(["q"], limit=10)] == [b"kept"]
    calls.connection.close()
    await store.close()


async def test_one_unreadable_message_becomes_failed_alone(url: str) -> None:
    store = await millpond.connect(url)
    await store.publish([Message(queue="q", payload=b"%d" % n, headers={"n": n}) for n in range(3)])
    execute(url, "UPDATE millpond_message SET headers = 'no json' WHERE payload = '1'")
    await store.publish([Message(queue="q", payload=b"late", expires=0)])
    calls = calls_of(url)
    assert [row[2] for row in calls.call("claim", "q", 10, 30)] == ["0", "2"]
    failed = await store.operations.archived("q")
    assert {row.reason: row.attempts for row in failed} == {"undecodable headers": 0, "expired": 0}
    calls.connection.close()
    await store.close()


async def test_a_paused_queue_and_a_suspect(url: str) -> None:
    """A suspect is claimed alone. It and the others take turns."""
    store = await millpond.connect(url)
    await store.publish([Message(queue="q", payload=b"%d" % n) for n in range(3)])
    execute(url, "UPDATE millpond_message SET crashes = 2 WHERE payload = '1'")
    calls = calls_of(url)
    await store.operations.pause("q")
    assert calls.call("claim", "q", 10, 30) == []
    await store.operations.resume("q")
    assert [row[2] for row in calls.call("claim", "q", 10, 30)] == ["1"]
    assert [row[2] for row in calls.call("claim", "q", 10, 30)] == ["0", "2"]
    calls.connection.close()
    await store.close()


async def test_a_header_may_have_any_character(url: str) -> None:
    headers = {"NUL": "a\0b", "big": 10**30}
    store = await millpond.connect(url)
    await store.publish([Message(queue="q", payload=b"x", headers=headers)])
    run_shell(url, r"""INSERT INTO millpond_publish (queue, body, headers) VALUES ('q', 'y', '{"c": "d"}');""")
    if url.startswith("postgres"):
        run_shell(url, r"""INSERT INTO millpond_publish (queue, body, headers) VALUES ('q', 'z', '{"e": "\u0000"}');""")
    shown = execute(url, "SELECT headers FROM millpond_message_view WHERE body = 'x'")
    calls = calls_of(url)
    rows = {row[2]: row[4] for row in calls.call("claim", "q", 10, 30)}
    assert [_decoded(value) for value in (shown[0][0], rows["x"], rows["y"])] == [headers, headers, {"c": "d"}]
    assert _decoded(rows.get("z", '{"e": "\\u0000"}')) == {"e": "\0"}
    assert await store.operations.archived("q") == []
    calls.connection.close()
    await store.close()


def _decoded(headers: Any) -> Any:
    return json.loads(headers) if isinstance(headers, str) else headers


async def test_a_claim_leaves_none_out_after_one_that_must_not_run(url: str) -> None:
    store = await millpond.connect(url)
    await store.publish([Message(queue="q", payload=b"%d" % n) for n in range(50)])
    execute(url, "UPDATE millpond_message SET expires_at = 1 WHERE payload = '2'")
    calls = calls_of(url)
    assert [int(row[2]) for row in calls.call("claim", "q", 10, 30)] == [0, 1, *range(3, 11)]
    assert [int(row[2]) for row in calls.call("claim", "q", 10, 30)] == list(range(11, 21))
    calls.connection.close()
    await store.close()


async def test_a_session_gives_lapsed_claims_back_after_the_clock_was_set_back(url: str) -> None:
    """The session knows when it last searched for them, which then lies in the future."""
    store = await millpond.connect(url)
    await store.publish([Message(queue="q", payload=b"x")])
    calls = calls_of(url)
    assert len(calls.call("claim", "q", 1, 0.001)) == 1
    future = 253_402_300_000_000_000
    postgres = url.startswith("postgres")
    _run(calls, f"SET millpond.reaped = '{future}'" if postgres else f"SET @millpond_reaped = {future}")

    async def claim() -> Any:
        return calls.call("claim", "q", 1, 30)

    ((_, _, body, *_),) = await until(claim)
    assert body == "x"
    calls.connection.close()
    await store.close()


def test_a_session_reads_from_the_beginning_after_the_clock_was_set_back(request: pytest.FixtureRequest) -> None:
    one, other = (PostgresCalls(empty_database(request, "postgres")) for _ in range(2))
    for body in "abc":
        one.call("publish", "q", body)
    (first, token, *_), _ = one.call("claim", "q", 2)
    assert not other.many("give_back", [first], token)
    place = one.connection.execute("SELECT current_setting('millpond.place')").fetchone()[0].split()
    one.connection.execute(f"SET millpond.place = '253402300000000000 {' '.join(place[1:])}'")
    assert [row[2] for row in one.call("claim", "q", 1)] == ["a"]
    one.connection.close()
    other.connection.close()


# --- MySQL and MariaDB -----------------------------------------------------------------------------------


@pytest.fixture
def mariadb(request: pytest.FixtureRequest) -> str:
    return empty_database(request, "mariadb")


async def test_safe_updates_of_a_session_refuse_no_call(mariadb: str) -> None:
    """MySQL Workbench, and the command line with --safe-updates, refuse an UPDATE or DELETE without a key."""
    store = await millpond.connect(mariadb)
    await store.publish([Message(queue="q", payload=b"%d" % n) for n in range(5)])
    execute(mariadb, "UPDATE millpond_message SET expires_at = 1 WHERE payload = '4'")
    calls = calls_of(mariadb)
    _run(calls, "SET sql_safe_updates = 1")
    with pytest.raises(pymysql.err.OperationalError, match="queue"):
        calls.call("publish", "", "refused", *[None] * 8)
    calls.set_time(at := 1_800_000_000_000_000)
    assert len(calls.call("claim", "q", 5, 1)) == 4
    calls.set_time(at + 2_000_000)  # the leases have lapsed: the claim gives them back first
    (one, token, *_), (two, *_), (three, *_), (four, *_) = calls.call("claim", "q", 5, 30)
    assert not calls.many("extend", [one], token, 60)
    assert not calls.many("ack", [one], token)
    assert not calls.many("nack", [two], token, None, "no stock")
    assert not calls.many("reject", [three], token, "no such sku", None)
    assert not calls.many("give_back", [four], token, None)
    with calls.connection.cursor() as cursor:
        cursor.execute("SELECT @@SESSION.sql_safe_updates")
        assert cursor.fetchall() == ((1,),)
    assert await counts(store) == {State.PENDING: 1, State.RETRYABLE: 1, State.COMPLETED: 1, State.FAILED: 2}
    calls.connection.close()
    await store.close()


async def test_a_claim_may_be_larger_than_an_aggregate_of_the_session(mariadb: str) -> None:
    """MariaDB cuts aggregates at group_concat_max_len, also JSON; servers set up as MySQL have 1,024 bytes."""
    store = await millpond.connect(mariadb)
    await store.publish([Message(queue="q", payload=b"%d" % n) for n in range(200)])
    calls = MysqlCalls(mariadb)
    _run(calls, "SET SESSION group_concat_max_len = 1024")
    verbs: list[tuple[Any, ...]] = [("extend", 60), ("nack", 0.0, None), ("nack", None, None), ("ack",)]
    assert len(calls.call("claim", "q", 1000, 30)) == 200
    execute(mariadb, "UPDATE millpond_message SET lease_until = 1")  # the next claim gives all of them back first
    for verb, *args in verbs:
        execute(mariadb, "UPDATE millpond_message SET due_at = 0")
        _run(calls, "SET @millpond_reaped = 0")
        rows = calls.call("claim", "q", 1000, 30)
        assert len(rows) == 200
        assert not calls.many(verb, [row[0] for row in rows], rows[0][1], *args)
        if verb == "extend":
            assert not calls.many("give_back", [row[0] for row in rows], rows[0][1], None)
    with pytest.raises(Exception, match="delay"):
        calls.call("nack", str(uuid4()), 1, -1, None)
    assert await counts(store) == {State.COMPLETED: 200}
    with calls.connection.cursor() as cursor:
        cursor.execute("SELECT @@group_concat_max_len")
        assert cursor.fetchone() == (1024,)
    calls.connection.close()
    await store.close()


async def test_calls_do_not_act_on_an_older_snapshot_of_their_transaction(mariadb: str) -> None:
    """REPEATABLE READ is the default: what others publish and claim after its first read is not in the snapshot."""
    store = await millpond.connect(mariadb)
    calls, other, id_ = MysqlCalls(mariadb), MysqlCalls(mariadb), str(uuid4())
    insert = f"INSERT INTO millpond_publish (queue, body, id) VALUES ('q', 'x', '{id_}')"
    _run(calls, "BEGIN")
    _run(calls, "SELECT count(*) FROM millpond_message")
    _run(other, insert)
    _run(calls, insert)
    assert calls.call("publish", "q", "x", id_, *[None] * 7) == [(id_, 0)]
    ((claimed, token, *_),) = other.call("claim", "q", 1, 30)
    assert not calls.many("nack", [claimed], token, None, "no stock")
    _run(calls, "COMMIT")
    assert await counts(store) == {State.RETRYABLE: 1}
    for one in (calls, other):
        one.connection.close()
    await store.close()


async def test_a_deadlock_is_reported_as_one(mariadb: str) -> None:
    """The server has undone the caller's transaction: the caller must know, and begin again."""
    store = await millpond.connect(mariadb)
    await store.publish([Message(queue="q", payload=b"x")])
    execute(
        mariadb,
        "CREATE TABLE IF NOT EXISTS shop_row (id INT PRIMARY KEY, n INT)",
        "DELETE FROM shop_row",
        "INSERT INTO shop_row SELECT seq, 0 FROM seq_1_to_200",
    )
    calls, other = MysqlCalls(mariadb), MysqlCalls(mariadb)
    ((id_, token, *_),) = calls.call("claim", "q", 1, 30)
    _run(other, "BEGIN")
    _run(other, "UPDATE shop_row SET n = 1 WHERE id > 1")  # the server undoes the one that wrote less
    _run(other, "SELECT id FROM millpond_message FOR UPDATE")
    _run(calls, "BEGIN")
    _run(calls, "UPDATE shop_row SET n = 2 WHERE id = 1")
    waiting = threading.Thread(target=_run, args=(other, "UPDATE shop_row SET n = 1 WHERE id = 1"))
    waiting.start()
    try:
        await until(lambda: mariadb_waits(partial(execute, mariadb)))
        with pytest.raises(pymysql.err.OperationalError) as caught:
            calls.many("ack", [id_], token)
        assert caught.value.args[0] == 1213
    finally:
        waiting.join()
    _run(other, "ROLLBACK")
    assert not calls.many("ack", [id_], token)
    for one in (calls, other):
        one.connection.close()
    await store.close()


async def test_a_claim_dates_expired_messages_after_a_lock_of_the_archive(mariadb: str) -> None:
    """An export waits for writers that read the time before they commit, not for one that read it before a lock."""
    store = await millpond.connect(mariadb)
    await store.publish([Message(queue="q", payload=b"x", expires=0)])
    calls, locker = MysqlCalls(mariadb), MysqlCalls(mariadb)
    _run(locker, "LOCK TABLES millpond_archive READ")
    claiming = threading.Thread(target=calls.call, args=("claim", "q", 1, 30))
    claiming.start()
    try:
        waits = "SELECT 1 FROM information_schema.processlist WHERE db = database() AND state LIKE 'Waiting for table%'"
        await until(lambda: execute(mariadb, waits))
        ((now,),) = execute(mariadb, "SELECT timestampdiff(MICROSECOND, '1970-01-01', utc_timestamp(6))")
    finally:
        _run(locker, "UNLOCK TABLES")
        claiming.join()
    assert execute(mariadb, f"SELECT archived_at >= {now} FROM millpond_archive") == [(1,)]
    for one in (calls, locker):
        one.connection.close()
    await store.close()


# --- hostile callers, on PostgreSQL ----------------------------------------------------------------------

_TABLES = """
CREATE SCHEMA hostile;
CREATE TABLE hostile.millpond_message (LIKE public.millpond_message);
CREATE TABLE hostile.millpond_archive (LIKE public.millpond_archive);
CREATE TABLE hostile.millpond_dedupe (LIKE public.millpond_dedupe);
CREATE FUNCTION hostile.millpond_clock() RETURNS bigint LANGUAGE plpgsql AS $$
BEGIN INSERT INTO hostile.stolen VALUES (current_user); RETURN 0; END $$;
"""
# Overloads for exact types win over the server's own ones, wherever the server's own ones are in the path.
_OVERLOADS = """
CREATE TABLE hostile.stolen (what text);
CREATE FUNCTION hostile.grab(a text, b text) RETURNS boolean LANGUAGE plpgsql AS $$
BEGIN INSERT INTO hostile.stolen VALUES (current_user); RETURN true; END $$;
CREATE OPERATOR hostile.= (FUNCTION = hostile.grab, LEFTARG = text, RIGHTARG = text);
CREATE FUNCTION hostile.grab(a double precision, b integer) RETURNS double precision LANGUAGE plpgsql AS $$
BEGIN INSERT INTO hostile.stolen VALUES (current_user); RETURN 0; END $$;
CREATE OPERATOR hostile.* (FUNCTION = hostile.grab, LEFTARG = double precision, RIGHTARG = integer);
CREATE OPERATOR hostile.+ (FUNCTION = hostile.grab, LEFTARG = double precision, RIGHTARG = integer);
CREATE FUNCTION hostile.power(double precision, integer) RETURNS double precision LANGUAGE plpgsql AS $$
BEGIN INSERT INTO hostile.stolen VALUES (current_user); RETURN 0; END $$;
CREATE FUNCTION hostile.left(text, integer) RETURNS text LANGUAGE plpgsql AS $$
BEGIN INSERT INTO hostile.stolen VALUES (current_user); RETURN ''; END $$;
"""


async def test_a_hostile_search_path_changes_nothing(postgres_url: str) -> None:
    store = await millpond.connect(postgres_url, migrate=True)
    run_shell(postgres_url, _TABLES + _OVERLOADS)
    await _work_as_intended(postgres_url, "hostile, pg_catalog, public", "hostile")
    await store.close()


@pytest.mark.parametrize("when", ["before", "after"])
async def test_hostile_functions_in_the_schema_of_the_tables_are_not_called(postgres_url: str, when: str) -> None:
    """Another account may create them there, and the functions run with the rights of the owner."""
    hostile = _OVERLOADS.replace("hostile.", "public.")
    if when == "before":
        run_shell(postgres_url, hostile)
    store = await millpond.connect(postgres_url, migrate=True)
    if when == "after":
        run_shell(postgres_url, hostile)
    await _work_as_intended(postgres_url, "public", "public")
    await store.close()


async def _work_as_intended(url: str, path: str, hostile: str) -> None:
    calls = PostgresCalls(url)
    calls.connection.execute(f"DELETE FROM {hostile}.stolen")  # of the account's own statements, not of functions
    calls.connection.execute(f"SET search_path = {path}")
    calls.call("publish", "q", "one", str(uuid4()), None, 3, None, 0.0)
    calls.connection.execute("INSERT INTO millpond_publish (queue, body, delay) VALUES ('q', 'two', 0)")
    rows = calls.call("claim", "q", 10, 30.0)
    assert [row[2] for row in rows] == ["one", "two"]
    token = rows[0][1]
    assert not calls.many("extend", [rows[0][0]], token, 60.0)
    assert not calls.many("ack", [rows[0][0]], token)
    assert not calls.many("nack", [rows[1][0]], token, None, "e")
    shown = calls.connection.execute("SELECT body FROM millpond_message_view").fetchall()
    assert [body for (body,) in shown] == ["two"]
    assert calls.connection.execute(f"SELECT what FROM {hostile}.stolen").fetchall() == []
    calls.connection.close()


async def test_no_function_is_executable_by_everybody_or_lacks_a_path(postgres_url: str) -> None:
    await (await millpond.connect(postgres_url, migrate=True)).close()
    with psycopg.connect(postgres_url) as connection:
        rows: list[Any] = connection.execute(
            "SELECT p.proname, p.proacl IS NULL OR EXISTS (SELECT 1 FROM aclexplode(p.proacl) a WHERE a.grantee = 0), "
            "p.proconfig, p.prosqlbody IS NOT NULL FROM pg_proc p WHERE p.pronamespace = 'public'::regnamespace"
        ).fetchall()
    assert len(rows) > 20
    assert [name for name, public, _, _ in rows if public] == []
    pinned = "search_path=pg_catalog, pg_temp"
    unpinned = [n for n, _, settings, parsed in rows if not parsed and pinned not in (settings or [])]
    assert unpinned == []


async def test_a_schema_and_a_prefix(postgres_server: Postgres) -> None:
    name = f"own_{uuid4().hex[:8]}"
    url = postgres_server.create_database(name)
    store = await millpond.connect(url, migrate=True, schema="queues", table_prefix="mp_")
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute("INSERT INTO queues.mp_publish (queue, body) VALUES ('q', 'x')")
        ((id_, token, body),) = connection.execute("SELECT id, token, body FROM queues.mp_claim('q')").fetchall()
        assert body == "x"
        assert connection.execute("SELECT queues.mp_ack(%s, %s)", (id_, token)).fetchone() == (True,)
        assert connection.execute("SELECT queues.mp_ack(%s, %s)", (uuid4(), token)).fetchone() == (False,)
    assert await counts(store) == {State.COMPLETED: 1}
    await store.close()
    postgres_server.drop_database(name)


def _run(calls: Calls, text: str) -> None:
    with calls.connection.cursor() as cursor:
        cursor.execute(text)
