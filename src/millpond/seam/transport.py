"""The seam between queues and databases or brokers: six verbs, and a room for each optional ability.

One conformance suite runs over every implementation. A backend that lacks an ability has no `Capability` flag for it
and raises `Unsupported`; it never ignores a call.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import Flag, auto
from typing import TYPE_CHECKING, Any, NoReturn, Protocol
from uuid import UUID

from millpond.clock import Seconds
from millpond.errors import not_supported
from millpond.message import Claim, Message, Published, Receipt
from millpond.outcome import Outcome
from millpond.telemetry import Event

if TYPE_CHECKING:
    from millpond.seam.access import Access
    from millpond.seam.bulk import Bulk
    from millpond.seam.diagnosis import Diagnosis
    from millpond.seam.exports import Exports
    from millpond.seam.operations import Operations
    from millpond.seam.periodic import PeriodicMessages
    from millpond.seam.streams import Streams
    from millpond.seam.transactions import Transactions
    from millpond.seam.workers import Workers

DEFAULT_LEASE = 30.0
NEVER_US = 253_402_300_799_000_000
"""End of the lease of a message that a stream holds: the end of the year 9999."""


class Capability(Flag):
    """An ability of a transport beyond the six verbs."""

    TRANSACTIONS = auto()
    """publish and settle within the caller's own database transaction"""
    CLAIM_BY_ID = auto()
    PRIORITY = auto()
    ORDER = auto()
    """claims come by due time and id, also of messages that were published late or given back"""
    DEDUPE = auto()
    """publishing a caller-given id twice is recognised"""
    UNIQUE = auto()
    """at most one message with a unique value waits"""
    EXTEND = auto()
    """extend lengthens a lease by a chosen time"""
    BROWSE = auto()
    """browse and count live messages"""
    PERIODIC = auto()
    """messages are published at the times of a schedule"""
    RESCHEDULE = auto()
    """reschedule and cancel"""
    ARCHIVE = auto()
    """settled messages are kept, read, purged and replayed"""
    DEAD_LETTERS = auto()
    """FAILED messages are kept, listed and published again"""
    PAUSE = auto()
    SETTINGS = auto()
    """lease, retry policy and limits are stored with a queue"""
    PRESENCE = auto()
    """a dead worker's claims come back before their lease ends"""
    STREAMS = auto()
    """Spark queries consume its queues exactly once"""
    STREAM_STATUS = auto()
    """these queries are listed, and their messages given back"""
    BULK = auto()
    """Spark publishes a whole batch at once, exactly once"""
    EXPORTS = auto()
    """the archive is exported to lakes"""
    FREE_RECEIPTS = auto()
    """any handle may settle and extend the claims of another one"""
    ACCESS = auto()
    """tokens of the server, and a record of operators' actions"""
    SHARED = auto()
    """several processes can use it at once"""
    ONE_ORDER = auto()
    """one order over all messages of a queue; over shards it holds on each shard"""
    UNIQUE_IDS = auto()
    """an id is published once, whatever its key; over shards the key decides where an id is looked up"""
    ATOMIC = auto()
    """a publish of several messages stores all or none"""
    DURABLE = auto()
    """messages survive the process"""


class Transport(Protocol):
    """Six verbs, and a room for each optional ability.

    Reading a room that the backend lacks raises `Unsupported` and names the capability.
    """

    on_event: Callable[[Event], None] | None
    """Called with the events that happen outside of a verb: `Reconnected`, `BrokerBlocked`."""

    @property
    def capabilities(self) -> Capability: ...

    async def publish(self, messages: Sequence[Message], *, within: Any = None) -> list[Published]:
        """Store messages, in a database all or none; returns for each whether it is new."""

    async def claim(
        self,
        queues: Sequence[str],
        limit: int = 1,
        lease: Seconds = DEFAULT_LEASE,
        *,
        ids: Sequence[UUID] | None = None,
        max_deliveries: int | None = None,
        suspects: bool = True,
        others: bool = True,
        ahead: bool = False,
        by_worker: bool = False,
    ) -> list[Claim]:
        """Take up to `limit` due messages, first by priority, then by due time, then by id.

        A message past `max_deliveries`, or expired, is FAILED and not returned. A suspect (two or more crashes) is
        returned alone, however many its crashes are. `suspects=False` leaves suspects in the queue, `others=False`
        leaves all others there. `ahead`: these messages wait for messages before them. If the worker dies, that is no
        crash of such a message unless an earlier delivery of it ended without a result. `by_worker`: the beats of the
        worker that joined on this handle extend the leases, until the messages are settled or detached.
        """

    async def extend(self, receipts: Sequence[Receipt], lease: Seconds = DEFAULT_LEASE) -> list[Receipt]:
        """Let the leases end `lease` seconds from now; returns the stale receipts.

        The lease of a message that a worker holds then ends `lease` seconds after the worker's last beat.
        """

    async def settle(
        self, outcomes: Sequence[Outcome], *, within: Any = None, wait: bool = True, again: bool = False
    ) -> list[Receipt]:
        """Write outcomes, each fenced by its receipt; returns the stale receipts. One never fails the others.

        For callers with their own retries. `wait=False`: one short try, which raises instead of waiting for locks or
        for a connection. `again`: an earlier call raised and may have written some of these; a message of which no
        row is left counts as settled.
        """

    async def wait(self, queues: Sequence[str], timeout: Seconds) -> None:
        """Return when a message may be due, at latest after `timeout`. It is a hint: only claim decides."""

    async def close(self) -> None:
        """Give back connections; every later call raises `Closed`."""

    @property
    def missing_shards(self) -> tuple[str, ...]:
        """Names of the shards that did not answer their last call; none on other transports."""
        return ()

    @property
    def operations(self) -> Operations: ...
    @property
    def periodic(self) -> PeriodicMessages: ...
    @property
    def streams(self) -> Streams: ...
    @property
    def bulk(self) -> Bulk: ...
    @property
    def exports(self) -> Exports: ...
    @property
    def access(self) -> Access: ...
    @property
    def diagnosis(self) -> Diagnosis: ...
    @property
    def transactions(self) -> Transactions: ...
    @property
    def workers(self) -> Workers: ...


class missing:
    """In place of a room that a backend lacks: reading it raises `Unsupported`, which names the capability."""

    def __init__(self, what: str, capability: Capability, remedy: str = "") -> None:
        self._what, self._capability, self._remedy = what, capability, remedy

    def __get__(self, transport: object, owner: type | None = None) -> NoReturn:
        raise not_supported(self._what, self._capability, self._remedy)


def refused(verb: str, capability: Capability) -> Any:
    """A verb of a room that a backend has only in part: calling it raises `Unsupported`."""

    async def refuse(self: object, *args: object, **options: object) -> NoReturn:
        raise not_supported(verb, capability)

    return refuse
