"""Databases that exist in virtual time only: they answer after measured times, and share the cores of their machine."""

import asyncio
import itertools
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from uuid import UUID

from bench.side import QUEUE
from millpond.errors import StoreUnavailable
from millpond.message import Claim, Draft, Message, Published, Receipt
from millpond.outcome import GiveBack, Outcome
from millpond.transports.database.messages.work_check import WorkFound
from millpond.transports.database.shards import misplaced
from millpond.transports.shard_map import ShardRecord

_SLICE = 0.001
"""Seconds after which a core goes to the next one that waits for it."""


@dataclass(frozen=True)
class Times:
    """Seconds of one call: processor time of the program, of the server, and the rest, such as that of the disk."""

    client: float
    server: float
    rest: float


@dataclass(frozen=True)
class Line:
    """The times of a call by the number of its messages."""

    fixed: Times
    each: Times

    def of(self, messages: int) -> Times:
        a, b = self.fixed, self.each
        return Times(a.client + b.client * messages, a.server + b.server * messages, a.rest + b.rest * messages)


Costs = Mapping[str, Line]
"""The times of `publish`, `claim` and `settle`."""


class Machine:
    """Cores that calls take turns to use."""

    def __init__(self, cores: int) -> None:
        self._cores = asyncio.Semaphore(cores)

    async def work(self, seconds: float) -> None:
        while seconds > 0:
            part = min(seconds, _SLICE)
            async with self._cores:
                await asyncio.sleep(part)
            seconds -= part


class Program:
    """A process with one event loop: it does one thing at a time."""

    def __init__(self, machine: Machine) -> None:
        self._machine = machine
        self._thread = asyncio.Lock()

    async def work(self, seconds: float) -> None:
        async with self._thread:
            await self._machine.work(seconds)


@dataclass
class Database:
    """A shard. Its messages are numbers; `rate` more of them may be claimed in each second."""

    record: ShardRecord
    machine: Machine
    costs: Costs
    backlog: float = 0
    rate: float = 0
    factor: float = 1
    """The calls of a slow shard take so many times longer."""
    refuses: bool = False
    silent: bool = False
    claimed: int = 0
    handled: int = 0
    returned: list[UUID] = field(default_factory=list)
    unsettled: dict[UUID, Program] = field(default_factory=dict)
    """Claimed messages, and who holds them."""
    calls: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self._since = asyncio.get_running_loop().time()
        self._number = int.from_bytes(self.record.name.encode()) << 64
        self._workers = itertools.count(1)

    @property
    def waiting(self) -> int:
        passed = asyncio.get_running_loop().time() - self._since
        return max(0, int(self.backlog + self.rate * passed) - self.claimed) + len(self.returned)

    def take(self, limit: int, program: Program) -> list[Claim]:
        ids = self.returned[:limit]
        del self.returned[:limit]
        new = min(limit - len(ids), self.waiting)
        ids += (UUID(int=self._number + n) for n in range(self.claimed, self.claimed + new))
        self.claimed += new
        self.unsettled |= dict.fromkeys(ids, program)
        return [Claim(_MESSAGE, Receipt(id_, 1), 1, 1, 0, 0, 0, 0) for id_ in ids]

    def settle(self, outcomes: Sequence[Outcome]) -> list[Receipt]:
        refused = []
        for outcome in outcomes:
            id_ = outcome.receipt.id
            if id_ not in self.unsettled:
                refused.append(outcome.receipt)
                continue
            del self.unsettled[id_]
            if isinstance(outcome, GiveBack):
                self.returned.append(id_)
            else:
                self.handled += 1
        return refused

    async def answer(self) -> None:
        """Raise while the shard is away. A call that met its silence ends with it, as its connection does."""
        if self.silent:
            await _until(lambda: not self.silent)
            raise StoreUnavailable(f"the connection to shard {self.record.name} was lost")
        if self.refuses:
            raise StoreUnavailable(f"shard {self.record.name} refuses connections")

    def next_worker(self) -> int:
        return next(self._workers)


async def _until(condition: Callable[[], bool]) -> None:
    """Look again and again: in virtual time that is cheap."""
    while True:
        if condition():
            return
        await asyncio.sleep(0.02)


_MESSAGE = Message(queue=QUEUE, payload=b"")


class StandIn:
    """The part of a database's store that a pond of several shards calls to publish, claim, settle and attend."""

    dialect: Any = None
    shard: Any = None
    placement: Any = None
    on_event: Any = None

    def __init__(self, database: Database, program: Program) -> None:
        self._database = database
        self._program = program
        self.shards = self.workers = self

    async def _call(self, verb: str, messages: int) -> None:
        database = self._database
        database.calls[verb] += 1
        times = database.costs[verb].of(messages)
        await self._program.work(times.client / 2)
        await database.answer()
        await asyncio.sleep(times.rest * database.factor)
        await database.machine.work(times.server * database.factor)
        await database.answer()

    async def _read(self, verb: str, messages: int) -> None:
        """The answer reaches the program."""
        await self._program.work(self._database.costs[verb].of(messages).client / 2)

    async def publish_drafts(self, drafts: Sequence[Draft]) -> list[Published]:
        if misplaced(self._database.record, drafts) is not None:
            raise RuntimeError("a message was routed to a wrong shard")
        await self._call("publish", len(drafts))
        self._database.backlog += len(drafts)
        await self._read("publish", len(drafts))
        return [Published(one.id) for one in drafts]

    async def claim(self, queues: Sequence[str], limit: int, lease: float, **options: Any) -> list[Claim]:
        await self._call("claim", min(limit, self._database.waiting))
        claims = self._database.take(limit, self._program)
        await self._read("claim", len(claims))
        return claims

    async def settle(self, outcomes: Sequence[Outcome], **options: Any) -> list[Receipt]:
        await self._call("settle", len(outcomes))
        refused = self._database.settle(outcomes)
        await self._read("settle", len(outcomes))
        return refused

    async def wait(self, queues: Sequence[str], timeout: float) -> None:
        await self._database.answer()
        await _until(lambda: self._database.waiting > 0)

    async def check_work(self, queues: Sequence[str]) -> WorkFound:
        self._database.calls["check"] += 1
        await self._database.answer()
        return WorkFound.DUE if self._database.waiting else WorkFound.NONE

    async def record(self) -> ShardRecord:
        await self._database.answer()
        return self._database.record

    async def join(self, *args: Any, **options: Any) -> "_Presence":
        await self._database.answer()
        return _Presence(self._database)

    async def holds(self, worker: int) -> bool:
        await self._database.answer()
        return self._program in self._database.unsettled.values()

    async def close(self) -> None: ...


class _Presence:
    """A worker's row on one shard."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self.id = database.next_worker()

    async def beat(self) -> bool:
        self._database.calls["beat"] += 1
        await self._database.answer()
        return True

    def consume(self, queues: Sequence[str]) -> None: ...

    def announce_stop(self) -> None: ...

    async def leave(self) -> None: ...
