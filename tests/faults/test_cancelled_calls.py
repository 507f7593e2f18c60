"""Calls within transactions are cancelled at random times, on every asynchronous driver, and the callers commit.

Each call has all of its effect or none: no id is burned, no message is in two places, and none is settled half.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import itertools
from collections.abc import Awaitable, Callable
from typing import Any
from uuid import UUID, uuid4

import pytest

from millpond import Ack, Claim, Message, Nack, Outcome, Reject, Transport
from millpond.clock import monotonic
from tests.faults.conftest import Everywhere
from tests.faults.load import load
from tests.faults.processes import stop
from tests.faults.report import Line
from tests.faults.setup import ALL, Setup
from tests.rooms.transactions.callers import ASYNC, CallerCalls, Open

pytestmark = pytest.mark.slow

CALLERS = 2
"""Number of concurrent callers with each driver."""
UNDISTURBED = 4
"""One of this number of calls is not cancelled: it shows how long a call takes."""


class Caller:
    """Calls the verbs on its own connections, one transaction after the other."""

    def __init__(self, here: Setup, store: Transport, opened: Open) -> None:
        self._here = here
        self._store = store
        self._open = opened
        self.published: list[list[Message]] = []
        """The messages of each publish, in one list."""
        self.claimed: list[list[Claim]] = []
        """The claims of each settle."""
        self.cancelled = 0
        self._took = 0.01
        """Seconds that the last undisturbed call took."""

    async def run(self, calls: int, *, cancels: bool) -> None:
        verbs = itertools.cycle([self._publish, self._publish_new, self._settle])
        done = 0
        while done < calls:
            with contextlib.suppress(Exception):  # some drivers close a connection whose call was cancelled
                async with self._open(self._here.url) as connection:
                    while done < calls:
                        done += 1
                        longest = 1.5 * self._took if cancels and done % UNDISTURBED else None
                        await self._claim()  # before: the transaction locks a SQLite file
                        await self._transaction(connection, next(verbs), longest)
            if self._here.name == "sqlite":
                gc.collect()  # SQLAlchemy drops the connection of a cancelled call, which locks the file until then

    async def _transaction(
        self, connection: CallerCalls, verb: Callable[[Any], Awaitable[None]], longest: float | None
    ) -> None:
        await connection.execute("INSERT INTO orders VALUES (1)")
        began = monotonic()
        try:
            async with asyncio.timeout(longest and self._here.chance.uniform(0, longest)):
                await verb(connection.within)
            self._took = monotonic() - began if longest is None else self._took
        except TimeoutError:
            self.cancelled += 1
        except Exception:  # an aborted transaction, a lost connection, a locked SQLite file
            await connection.rollback()
            return
        await connection.commit()

    async def _publish(self, within: Any) -> None:
        """With ids of the caller."""
        self.published.append([Message(queue="q", payload=b"", id=uuid4()) for _ in range(3)])
        await self._store.publish(self.published[-1], within=within)

    async def _publish_new(self, within: Any) -> None:
        """With and without ids."""
        given = Message(queue="q", payload=b"", id=uuid4())
        self.published.append([given])
        await self._store.publish([given, Message(queue="other", payload=b"")], within=within)

    async def _settle(self, within: Any) -> None:
        await self._store.settle(outcomes(self.claimed[-1]), within=within)

    async def _claim(self) -> None:
        queue = uuid4().hex
        await self._store.publish([Message(queue=queue, payload=b"") for _ in range(3)])
        self.claimed.append(await self._store.claim([queue], limit=3, lease=3600))


def outcomes(claims: list[Claim]) -> list[Outcome]:
    a, b, c = [claim.receipt for claim in claims]
    return [Ack(a), Reject(b), Nack(c, delay=3600)]


@pytest.mark.filterwarnings("ignore::ResourceWarning")  # SQLAlchemy drops connections whose calls were cancelled
@pytest.mark.databases(*ALL)
async def test_all_or_nothing(everywhere: Everywhere, long: bool) -> None:
    async def scenario(here: Setup) -> None:
        await here.rows("CREATE TABLE orders (id INTEGER)")
        drivers = [opened for database, opened in ASYNC.values() if database == here.name]
        callers = [Caller(here, here.store, opened) for opened in drivers * CALLERS]
        worker = here.processes.start(here.plan("plain", folder="worker"))
        rates = []
        async with load(here) as others:
            for calls, cancels in ((100 if long else 2, False), (900 if long else 8, True)):
                mark = await others.mark()
                await asyncio.gather(*(caller.run(calls, cancels=cancels) for caller in callers))
                rates.append(await others.rate_since(mark))
        await here.drained_of("plain")
        await stop(worker)
        await judge(here, callers, rate=rates[1] / rates[0])

    await everywhere(scenario)
    gc.collect()  # while the warnings are ignored


async def judge(here: Setup, callers: list[Caller], *, rate: float) -> None:
    places = await states(here)
    half = burned = twice = 0
    for messages in [messages for caller in callers for messages in caller.published]:
        ids = [message.id for message in messages]
        there = [id_ in places for id_ in ids]
        half += len(set(there)) > 1
        new = [published.new for published in await here.store.publish(messages)]
        burned += sum(not was and not is_new for was, is_new in zip(there, new, strict=True))
        twice += sum(was and is_new for was, is_new in zip(there, new, strict=True))
    for claims in [claims for caller in callers for claims in caller.claimed]:
        now = [places[claim.message.id] for claim in claims]
        half += now not in (["PROCESSING"] * 3, ["COMPLETED", "FAILED", "RETRYABLE"])
        refused = await here.store.settle(outcomes(claims))
        burned += len(refused)
    cancelled = sum(caller.cancelled for caller in callers)
    calls = sum(len(caller.published) + len(caller.claimed) for caller in callers)
    await here.report_line(
        Line(
            *("calls cancelled in transactions", here.name, calls, cancelled, burned, twice),
            rate=rate,
            more={"half": half},
        )
    )
    assert (half, burned, twice) == (0, 0, 0)
    assert cancelled


async def states(here: Setup) -> dict[UUID, str]:
    """The state of each message; one that is in two places is an error."""
    rows = await here.rows("SELECT id, state FROM millpond_message UNION ALL SELECT id, state FROM millpond_archive")
    found = {id_ if isinstance(id_, UUID) else UUID(bytes=bytes(id_)): state for id_, state in rows}
    assert len(found) == len(rows)
    return found
