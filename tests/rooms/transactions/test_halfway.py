"""A call that ends half-way leaves all of its effect or none, even if the caller then commits."""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from typing import Any
from uuid import UUID, uuid4

import asyncpg
import pytest

import millpond
from millpond import Ack, Message, Nack, Reject
from millpond.transports.database.borrowed import transaction
from tests.rooms.transactions.caller import Caller, Verbs, with_store
from tests.rooms.transactions.callers import ASYNC, REPEATED, CallerCalls, params
from tests.triggers import failing

pytestmark = pytest.mark.slow_on_servers


async def commit(calls: CallerCalls) -> None:
    """Commit, as a caller does that goes on after an error. An aborted transaction commits nothing."""
    with contextlib.suppress(Exception):
        await calls.commit()


def given(*ids: UUID) -> list[Message]:
    return [Message(queue="q", payload=b"", id=id_) for id_ in ids]


def all_or_none(caller: Caller, ids: list[UUID]) -> None:
    """Each id is in the queue or can be published."""
    rows = caller.rows_of("SELECT id FROM millpond_message")
    held = {id_.bytes if isinstance(id_, UUID) else bytes(id_) for (id_,) in rows}
    new = {p.id for p in with_store(caller.url, lambda store: store.publish(given(*ids))) if p.new}
    assert [(id_.bytes in held) != (id_ in new) for id_ in ids] == [True] * len(ids)
    assert held in (set(), {id_.bytes for id_ in ids})


def one_place(caller: Caller, claims: list[millpond.Claim]) -> None:
    """Each message is live or archived, and all were settled or none."""
    states = caller.states()
    assert len(states) == len(claims)
    assert states.count("PROCESSING") in (0, len(claims))


def outcomes(claims: list[millpond.Claim]) -> list[millpond.Outcome]:
    a, b, c = [claim.receipt for claim in claims]
    return [Ack(a), Reject(b), Nack(c, delay=60)]


def test_a_publish_that_fails(caller: Caller) -> None:
    ids = [uuid4(), uuid4()]

    async def body(calls: CallerCalls, verbs: Verbs) -> None:
        await calls.execute("INSERT INTO orders VALUES (1)")
        with pytest.raises(Exception, match="no"):
            await verbs.publish(given(*ids), calls.within)
        await commit(calls)

    with failing(caller.url, "INSERT", "millpond_message"):
        caller.run(body)
    assert caller.rows_of("SELECT id FROM millpond_dedupe") == []
    all_or_none(caller, ids)


def test_a_settle_that_fails(caller: Caller) -> None:
    claims = caller.claimed("a", "b", "c")

    async def body(calls: CallerCalls, verbs: Verbs) -> None:
        await calls.execute("INSERT INTO orders VALUES (1)")
        with pytest.raises(Exception, match="no"):
            await verbs.settle(outcomes(claims), calls.within)
        await commit(calls)

    with failing(caller.url, "DELETE", "millpond_message", "ROW.queue = 'b'"):
        caller.run(body)
    assert caller.states() == ["PROCESSING"] * 3
    assert caller.settle(*outcomes(claims)) == []


def test_the_transaction_goes_on_after_an_error(caller: Caller) -> None:
    """On PostgreSQL any error aborts the transaction."""
    (known,) = caller.claimed("a")
    aborted = caller.url.startswith("postgres")

    async def body(calls: CallerCalls, verbs: Verbs) -> None:
        await calls.execute("INSERT INTO orders VALUES (1)")
        with pytest.raises(Exception, match="no"):
            await verbs.publish([*given(uuid4()), Message(queue="bad", payload=b"")], calls.within)
        if aborted:
            with pytest.raises(Exception, match="transaction is aborted"):
                await verbs.publish(given(uuid4()), calls.within)
            await calls.rollback()
            return
        await verbs.publish(given(uuid4()), calls.within)
        assert await verbs.settle([Ack(known.receipt)], calls.within) == []
        await calls.commit()

    with failing(caller.url, "INSERT", "millpond_message", "ROW.queue = 'bad'"):
        caller.run(body)
    assert caller.orders() == (0 if aborted else 1)
    assert caller.states() == (["PROCESSING"] if aborted else ["COMPLETED", "PENDING"])


class Interrupted:
    """Cancels the calling task in the n-th statement, before its reply or after it."""

    def __init__(self, borrowed: Any, n: int, when: str) -> None:
        self._borrowed = borrowed
        self._left = n
        self._when = when
        self.database = borrowed.database
        self.connection = borrowed.connection

    async def begun(self) -> bool:
        return bool(await self._borrowed.begun())

    def is_busy(self, error: Exception) -> bool:
        return bool(self._borrowed.is_busy(error))

    async def execute(self, step: Any) -> Any:
        self._left -= 1
        if self._left == 0 and self._when == "before the reply":
            task = asyncio.current_task()
            assert task is not None
            task.cancel()
        rows = await self._borrowed.execute(step)
        if self._left == 0 and self._when == "after the reply":
            raise asyncio.CancelledError
        return rows


@pytest.fixture(params=params(ASYNC, REPEATED, pytest.mark.long))
def async_caller(request: pytest.FixtureRequest) -> Caller:
    database, opened = ASYNC[request.param]
    return Caller(request.getfixturevalue(f"{database}_url"), opened, sync=False)


@pytest.fixture(params=["before the reply", "after the reply"])
def interrupt(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Let calls be cancelled in their n-th statement."""
    real = transaction.adapt

    def interrupt(n: int) -> None:
        async def adapt(connection: Any) -> Any:
            return Interrupted(await real(connection), n, request.param)

        monkeypatch.setattr(transaction, "adapt", adapt)

    return interrupt


def cancelled(caller: Caller, call: Callable[[CallerCalls, Verbs], Awaitable[Any]]) -> bool:
    """Whether the call was cancelled. The caller commits in any case."""
    ended = False

    async def body(calls: CallerCalls, verbs: Verbs) -> None:
        nonlocal ended
        await calls.execute("INSERT INTO orders VALUES (1)")
        task = asyncio.create_task(call(calls, verbs))  # type: ignore[arg-type]
        with contextlib.suppress(asyncio.CancelledError):
            await task
        ended = task.cancelled()
        await commit(calls)

    with contextlib.suppress(Exception):  # some drivers close a connection whose call was cancelled
        caller.run(body)
    return ended


def test_a_publish_that_is_cancelled(async_caller: Caller, interrupt: Callable[[int], None]) -> None:
    n = 1
    while True:
        ids = [uuid4(), uuid4()]
        interrupt(n)
        ended = cancelled(async_caller, lambda calls, verbs: verbs.publish(given(*ids), calls.within))  # noqa: B023
        all_or_none(async_caller, ids)
        if not ended:
            break
        async_caller.rows_of("DELETE FROM millpond_message")
        n += 1
    assert n > 1


def test_a_settle_that_is_cancelled(async_caller: Caller, interrupt: Callable[[int], None]) -> None:
    n = 1
    while True:
        claims = async_caller.claimed("a", "b", "c")
        interrupt(n)
        ended = cancelled(async_caller, lambda calls, verbs: verbs.settle(outcomes(claims), calls.within))  # noqa: B023
        one_place(async_caller, claims)
        if not ended:
            break
        async_caller.rows_of("DELETE FROM millpond_message")
        async_caller.rows_of("DELETE FROM millpond_archive")
        n += 1
    assert n > 3


on = lambda *names: pytest.mark.parametrize("async_caller", params({n: ASYNC[n] for n in names}), indirect=True)  # noqa: E731


@on("asyncpg", "psycopg, async", "aiosqlite", "asyncmy")
def test_two_calls_at_once(async_caller: Caller) -> None:
    """On one connection, of which one fails: the other one has all of its effect, or the transaction is aborted."""
    good, bad = [uuid4(), uuid4()], [uuid4(), uuid4()]
    claims = async_caller.claimed("a", "b", "c")
    done: dict[str, bool] = {}

    async def body(calls: CallerCalls, verbs: Verbs) -> None:
        await calls.execute("INSERT INTO orders VALUES (1)")
        refused = [*given(bad[0]), Message(queue="bad", payload=b"", id=bad[1])]
        results = await asyncio.gather(
            verbs.publish(refused, calls.within),
            verbs.publish(given(*good), calls.within),
            verbs.settle(outcomes(claims), calls.within),
            return_exceptions=True,
        )
        failed = [isinstance(result, BaseException) for result in results]
        assert failed[0]
        await calls.commit()
        done.update(publish=not failed[1], settle=not failed[2])

    with failing(async_caller.url, "INSERT", "millpond_message", "ROW.queue = 'bad'"), contextlib.suppress(Exception):
        async_caller.run(body)
    if not async_caller.url.startswith("postgres"):  # there a commit rolled back
        assert done == {"publish": True, "settle": True}
        assert async_caller.states() == ["COMPLETED", "FAILED", "RETRYABLE", "PENDING", "PENDING"]
        async_caller.rows_of("DELETE FROM millpond_archive")
        async_caller.rows_of("DELETE FROM millpond_message WHERE queue <> 'q'")
    else:
        assert async_caller.states() == ["PROCESSING"] * 3
        async_caller.rows_of("DELETE FROM millpond_message")
        good = [*good, *bad]
    all_or_none(async_caller, good)


class Meeting:
    """Begins a statement of the caller just before the n-th statement of a call."""

    def __init__(self, borrowed: Any, n: int, own: Callable[[], Awaitable[Any]]) -> None:
        self._borrowed = borrowed
        self._left = n
        self._own = own
        self.database = borrowed.database
        self.connection = borrowed.connection
        self.begun = borrowed.begun
        self.is_busy = borrowed.is_busy

    async def execute(self, step: Any) -> Any:
        self._left -= 1
        if self._left == 0:
            self.met = asyncio.ensure_future(self._own())
            await asyncio.sleep(0)
        return await self._borrowed.execute(step)


@on("asyncpg")
def test_a_statement_of_the_caller_at_the_same_time(async_caller: Caller, monkeypatch: pytest.MonkeyPatch) -> None:
    """The driver refuses the second of two statements, which is ours: then nothing of our call is left."""
    real, n, refused = transaction.adapt, 1, True  # the first statement asks which database this is
    while refused:
        n, refused = n + 1, False
        claims = async_caller.claimed("a", "b", "c")

        async def body(calls: CallerCalls, verbs: Verbs) -> None:
            nonlocal refused
            await calls.execute("INSERT INTO orders VALUES (1)")

            async def adapt(connection: Any) -> Any:
                return Meeting(await real(connection), n, lambda: calls.execute("SELECT pg_sleep(0.1)"))  # noqa: B023

            monkeypatch.setattr(transaction, "adapt", adapt)
            try:
                await verbs.settle(outcomes(claims), calls.within)  # noqa: B023
            except asyncpg.InterfaceError:
                refused = True
            await commit(calls)

        async_caller.run(body)
        one_place(async_caller, claims)
        async_caller.rows_of("DELETE FROM millpond_message")
        async_caller.rows_of("DELETE FROM millpond_archive")
    assert n > 3


@on("aiosqlite", "asyncmy")
def test_a_cancellation_while_an_error_is_undone(async_caller: Caller, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is not swallowed: the task ends."""
    real = transaction._undo
    cancelled = False

    async def undo(*arguments: Any) -> None:
        assert task is not None
        task.cancel()
        await real(*arguments)

    task: asyncio.Task[Any] | None = None

    async def body(calls: CallerCalls, verbs: Verbs) -> None:
        nonlocal task, cancelled
        await calls.execute("INSERT INTO orders VALUES (1)")
        task = asyncio.create_task(verbs.publish([*given(uuid4()), *given(uuid4())], calls.within))  # type: ignore[arg-type]
        await asyncio.wait([task])
        cancelled = task.cancelled()

    monkeypatch.setattr(transaction, "_undo", undo)
    with failing(async_caller.url, "INSERT", "millpond_message"), contextlib.suppress(Exception):
        async_caller.run(body)
    assert cancelled
