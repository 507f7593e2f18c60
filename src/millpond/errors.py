"""Every error that a caller can meet. Each has one meaning, and its text names the remedy.

`retryable` is true if the same call may be repeated: nothing was lost, and nothing is known to be half-written.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # message.py is above this module; at run time errors import no other module of Millpond
    from uuid import UUID

    from millpond.message import Receipt


class MillpondError(Exception):
    """The root of all errors raised by Millpond itself."""

    retryable = False


# --- arguments ------------------------------------------------------------------------------------


class InvalidURL(MillpondError, ValueError):
    """The URL cannot be read. The text never contains its password."""


class UnknownScheme(InvalidURL):
    """No transport has this URL scheme."""


class MissingDriver(MillpondError, ImportError):
    """The transport needs an extra that is not installed."""


class InvalidOption(MillpondError, ValueError):
    """An option is unknown or its value is out of range."""


class InvalidMessage(MillpondError, ValueError):
    """A message that no transport accepts. Nothing was published."""


class InvalidQueue(InvalidMessage):
    """A queue name, key, replay name or `once` key that is empty, too long, or has characters that cannot be stored."""


class InvalidPriority(InvalidMessage):
    """A priority outside 0..100."""


class InvalidTime(InvalidMessage):
    """A naive datetime, a negative delay, or two times that contradict each other."""


class BodyTooLarge(InvalidMessage):
    """The body, the headers or the result of a step exceed the limit of this transport."""


class BodyNotEncodable(InvalidMessage, TypeError):
    """The body is neither bytes nor text nor JSON, or the headers are not JSON."""


class BodyNotDecodable(MillpondError, ValueError):
    """The stored body does not match the annotation of the handler."""


# --- transports -----------------------------------------------------------------------------------


class Unsupported(MillpondError):
    """This transport lacks a capability. The text names it."""


class Closed(MillpondError):
    """The transport was closed. Connect again."""


class WrongConnection(MillpondError, TypeError):
    """`within=` got an object that cannot run this store's writes in the caller's transaction."""


class WrongDatabase(WrongConnection):
    """`within=` got a connection to another database than the store's, of the same or another kind."""


class LeaseLost(MillpondError):
    """The receipt is stale: the message was reaped, given back, or settled by another worker. Nothing was written."""

    def __init__(self, receipts: Sequence[Receipt], message: str | None = None) -> None:
        self.receipts = tuple(receipts)
        ids = ", ".join(str(r.id) for r in self.receipts[:3]) + ("…" if len(self.receipts) > 3 else "")
        super().__init__(
            message
            or f"lease lost for message {ids}: another claim owns it now, and nothing was written; "
            "lengthen the lease or extend it while the handler runs"
        )


# --- streams --------------------------------------------------------------------------------------


class NotUnique(MillpondError):
    """A message with the same unique value waits, is unfinished, or was published within the window."""

    def __init__(self, queue: str, id: UUID) -> None:
        self.id = id
        """The message that has the value."""
        super().__init__(f"the queue {queue!r} has a message with this unique value, {id}; nothing was published")


class WorkerStuck(MillpondError):
    """The worker cannot go on: its heartbeat ended, or with `end_when_stuck` all handlers of a subscriber hang."""


class StreamError(MillpondError):
    """A Spark query cannot continue to consume its queues."""


class StreamFenced(StreamError):
    """Another driver opened the stream, or an operator released it. This driver can write nothing more."""


class ClaimLost(StreamError):
    """A batch cannot be read again unchanged, because its claim was released or its messages were changed by hand."""


class StreamBehind(StreamError):
    """The checkpoint is older than the last acknowledged claim of the stream, or belongs to another query."""


class StreamTaken(StreamError):
    """The stream holds a batch of another checkpoint, whose sink may have its messages. Nothing was claimed."""


class UnknownStream(StreamError):
    """The database has no stream of this name."""


# --- bulk writes ----------------------------------------------------------------------------------


class BatchChanged(MillpondError):
    """A batch, or a part of one, was published before with another number of rows. Nothing was published now."""


# --- the lake -------------------------------------------------------------------------------------


class LakeError(MillpondError):
    """The lake is missing, damaged or another one. Nothing was written to it."""


class NoLake(LakeError):
    """This folder has no lake."""


class LakeFenced(LakeError):
    """Other exports of the same databases committed first, again and again. This one has committed nothing."""


class LakeDamaged(LakeError):
    """The log of the lake has a gap, a file is missing, or this version does not know its format."""


class LakeIncomplete(LakeError):
    """The archive has other messages than were exported, so the lake may lack some. They were not purged."""


class WrongLake(LakeError):
    """The database was exported to another lake, or the lake belongs to another database. Nothing was exported."""


# --- the database ---------------------------------------------------------------------------------


class StoreError(MillpondError):
    """An error of the database, or of the connection to it."""


class _SettledInPart(StoreError):
    """An error after which a settle may have written a part.

    Raised by a settle, `receipts` are those of the messages that are left; all other outcomes were written, except
    those of stale receipts, `refused`. Without `receipts` nothing is known to be written.
    """

    again = False
    """True if the database may still write some of the outcomes that are left: settle those with `again=True`."""

    def __init__(self, message: str, receipts: Sequence[Receipt] = (), refused: Sequence[Receipt] = ()) -> None:
        self.receipts = tuple(receipts)
        self.refused = tuple(refused)
        super().__init__(message)


class StoreBusy(_SettledInPart):
    """Other transactions held locks for longer than `busy_timeout`. Call again.

    Raised by a settle, `receipts` are those of locked messages.
    """

    retryable = True


class StoreUnavailable(StoreError):
    """The database cannot be reached, or the connection was lost for longer than `reconnect_timeout`."""

    retryable = True
    unsent = False
    """True if no statement of the call was sent, so it had no effect."""


class Unreachable(StoreUnavailable):
    """No server answers at this address."""


class DataRefused(_SettledInPart):
    """The database refused a value: too long, of a wrong type, or against a constraint. A later try fails too.

    Raised by a settle, `receipts` are those of the messages that it concerns.
    """


class AuthenticationFailed(StoreError):
    """The database refused the user or the password."""


class MissingRight(AuthenticationFailed):
    """The account lacks a right on a table or function, which the text names."""


class EncryptionFailed(StoreError):
    """No encrypted connection: the server's certificate is not trusted, or the server has no TLS."""


class UnknownQueue(StoreError):
    """No queue has this name: it has no message and no settings."""


class UnknownDatabase(StoreError):
    """The server has no database of this name."""


class Unroutable(StoreError):
    """The broker has no queue for the message. It was not published."""


class QueueMismatch(StoreError):
    """The broker has a queue of this name with other settings."""


class StagingLost(StoreError):
    """Loaded rows of a bulk write were lost before its commit. Nothing was published; write the batch again."""

    retryable = True


class NotMigrated(StoreError):
    """The database has no tables of Millpond, or older ones."""


class TableExists(StoreError):
    """A table of another program has a name that Millpond needs. Nothing was created."""


class ShardMapMismatch(StoreError):
    """The databases are not the shards of one map: one has no map, another map, or another version of it."""


class WrongShard(StoreError):
    """A message belongs to another shard. Nothing was published."""


class ShardMapChanged(WrongShard):
    """The shard map was changed, and the message now belongs to another shard. Nothing was published; publish again.

    A pond of several URLs reads the new map and does so by itself; it raises this if the change takes too long.
    """

    retryable = True

    def __init__(self, message: str, map_: Any = None, stored: Sequence[Any] = ()) -> None:
        self.map = map_
        """The map that the shard has."""
        self.stored = tuple(stored)
        """Ids of messages that an earlier try of the same call stored although its reply was lost."""
        super().__init__(message)


class MoverFenced(StoreError):
    """Another operator took over the change of the shard map. Nothing is lost; that one continues."""


class ShardUnavailable(StoreUnavailable):
    """One shard does not answer. The messages of all others are not affected."""

    def __init__(self, message: str, shard: str = "", *, unsent: bool = False) -> None:
        self.shard = shard
        self.unsent = unsent
        super().__init__(message)


class PartlyPublished(StoreError):
    """A publish over several shards failed on some of them. `published` has the ids that the others stored."""

    def __init__(self, message: str, published: Sequence[Any] = ()) -> None:
        self.published = tuple(published)
        super().__init__(message)


class SchemaMismatch(StoreError):
    """The tables belong to another version of Millpond."""


def not_supported(what: str, capability: Any, remedy: str = "") -> Unsupported:
    text = f"{what} is not possible on this transport: it lacks the capability {capability.name}"
    return Unsupported(f"{text}; {remedy}" if remedy else text)


def stream_behind(stream: str, seq: int, acked: int) -> StreamBehind:
    return StreamBehind(
        f"stream {stream!r}: the checkpoint is at claim {seq}, and the stream has acknowledged claim {acked}. The "
        "checkpoint is an old copy, or another query uses the same stream name; continuing would number new "
        "messages like old ones. Start from the newest checkpoint, or with a new stream name"
    )


def claim_lost(stream: str, seq: int, expected: int, found: int) -> ClaimLost:
    return ClaimLost(
        f"stream {stream!r}: claim {seq} held {expected:,} messages, and now holds {found:,}: it was released, or "
        "changed by hand. Messages that were given back are delivered again, even if the sink has them. To continue "
        "with the others, start the query with failOnDataLoss=false"
    )
