"""The workers room: presence of worker processes, the claims that they hold, and the reaper."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Literal, Protocol
from uuid import UUID, uuid5

import msgspec

from millpond.clock import Seconds, seconds
from millpond.errors import InvalidOption
from millpond.message import Receipt, check_text

DEAD_AFTER = 2.0
"""Seconds of silence after which a worker that is cut off may lose its claims."""
_SCOPES = UUID("6d696c6c-706f-5e64-8000-73746570733a")
"""Steps with a scope of the caller have ids below this one."""
_LEAST_DEAD_AFTER = 1.0
"""A worker beats twice a second, and a busy database delays beats."""


def check_dead_after(dead_after: Seconds) -> float:
    """The option in seconds."""
    value = seconds(dead_after, "dead_after")
    if value < _LEAST_DEAD_AFTER:
        raise InvalidOption(f"dead_after must be {_LEAST_DEAD_AFTER:g} s or longer, not {value:g} s")
    return value


class Presence(Protocol):
    """A worker's row, lock and heartbeat."""

    @property
    def id(self) -> int: ...

    @property
    def dead_after(self) -> float:
        """Seconds without a beat after which other workers may take the claims of this one."""

    @property
    def doubtful(self) -> Mapping[str, int]:
        """Shards whose messages other workers may have taken, during a silence that is over; with its number.

        Nothing is claimed from them until `trust`.
        """

    def trust(self, shard: str, silence: int) -> None:
        """The worker's messages of this shard were checked after that silence: claim from it again."""

    @property
    def cut_off(self) -> Collection[str]:
        """Shards that no beat has reached for `dead_after`, while others are reached."""

    async def beat(self) -> bool:
        """Renew the heartbeat, and take the lock again if the session was lost; False while neither is possible."""

    def consume(self, queues: Sequence[str]) -> None:
        """Let the next beat record the queues that the worker consumes now."""

    def announce_stop(self) -> None:
        """Let the next beat record that the worker stops: its death after that is no crash of its messages."""

    async def leave(self) -> None:
        """Be no worker any more. Messages that it still holds get separate leases."""


class WorkerStatus(msgspec.Struct, frozen=True, kw_only=True):
    """A worker as an operator sees it."""

    id: int
    name: str
    started_us: int
    beat_us: int
    silent_for: float
    """Seconds since its last beat, by the database's clock."""
    dead_after: float
    stopping: bool
    queues: tuple[str, ...] | None
    """Queues that it consumes; None: it did not record them."""
    held: int
    """Messages that it has claimed."""
    oldest_held_us: int | None
    """Time of the oldest claim among these."""

    @property
    def beats(self) -> bool:
        """Whether its last beat is recent enough for a living worker."""
        return self.silent_for <= max(self.dead_after, 5.0)


class Step(msgspec.Struct, frozen=True):
    """One piece of work of a handler outside of its transaction, such as a call of another service."""

    name: str
    scope: str
    """The message's id, or a business id of the caller."""
    id: UUID

    @property
    def key(self) -> str:
        """The idempotency key for the other service: the same in every try of this step."""
        return str(self.id)


class StepClaim(msgspec.Struct, frozen=True):
    """Answer to a delivery that wants to run a step."""

    state: Literal["owned", "done", "held", "stale"]
    """`held`: another delivery that lives owns it. `stale`: the receipt is."""
    result: bytes | None = None
    """JSON, if it is done."""


def message_step(message: UUID, name: str) -> Step:
    """The step of one message."""
    return Step(_text(name, "step"), str(message), uuid5(message, f"millpond step {name}"))


def scoped_step(scope: str, name: str) -> Step:
    """The step of all messages with this scope."""
    return Step(_text(name, "step"), _text(scope, "scope"), uuid5(_SCOPES, f"{len(scope)} {scope} {name}"))


def _text(text: str, what: str) -> str:
    if text == "":  # a forgotten business id: unrelated messages would share one result
        raise InvalidOption(f"{what} must not be empty")
    return check_text(text, what)


class Workers(Protocol):
    """Join as a worker, and give back the claims of dead ones."""

    async def join(
        self, name: str | None = None, *, dead_after: Seconds = DEAD_AFTER, queues: Sequence[str] | None = None
    ) -> Presence:
        """Become a worker whose death others notice. Claims `by_worker` are then held by its beats.

        `queues`: those that it consumes, for operators.
        """

    async def status(self) -> list[WorkerStatus]:
        """The workers that have a row, by name, and the number of messages that each holds."""

    async def cancel(self, ids: Sequence[UUID], *, reason: str = "cancelled") -> list[UUID]:
        """Ask the workers that run these messages to cancel them; returns the ids that a worker holds.

        The worker cancels an async handler; one in a thread finds `delivery.interrupted`. The message becomes FAILED
        with the reason, unless its handler has decided before.
        """

    async def cancel_requests(self) -> dict[Receipt, str]:
        """Claims that were cancelled and are still held, with the reasons; workers read this every second."""

    async def begin_step(self, receipt: Receipt, step: Step) -> StepClaim:
        """Own a step, unless it is done or another delivery that lives owns it."""

    async def finish_step(self, receipt: Receipt, step: Step, result: bytes) -> bool:
        """Store the result of a step that this receipt owns; False if the receipt is stale.

        Raises `BodyTooLarge` for more bytes than a body may have.
        """

    async def reap(self) -> int:
        """Give back the messages of lapsed leases and of dead and hung workers; returns their number.

        A worker never gives back the messages that its own beats hold.
        """

    async def stale(self, receipts: Sequence[Receipt]) -> list[Receipt]:
        """Return the stale receipts among these. Nothing is written."""

    async def detach(self, receipts: Sequence[Receipt], *, abandoned: bool = False) -> list[Receipt]:
        """Give messages of a worker separate leases, which begin now and which no beat extends.

        `abandoned`: no handler has them any more; the end of the lease is then no crash.

        Returns the receipts for which nothing was written: stale ones, and those of rows that another transaction has
        locked.
        """

    async def attach(self, receipts: Sequence[Receipt]) -> list[Receipt]:
        """Let the beats of their worker hold detached messages again; returns as `detach` does."""
