"""Every error a caller can meet, each with one meaning and a text that says what to do.

`retryable` tells whether the same call may simply be made again: nothing was lost and nothing is known
to be half-written.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # the type's home is above this module; at run time errors import nothing of ours
    from millpond.message import Receipt


class MillpondError(Exception):
    """The root of all errors raised by Millpond itself."""

    retryable = False


# --- what the caller typed ------------------------------------------------------------------------


class InvalidURL(MillpondError, ValueError):
    """The URL cannot be read; the password, if any, is never repeated."""


class UnknownScheme(InvalidURL):
    """No transport has this URL scheme."""


class MissingDriver(MillpondError, ImportError):
    """The transport needs an extra that is not installed."""


class InvalidOption(MillpondError, ValueError):
    """An option is unknown or its value is out of range."""


class InvalidMessage(MillpondError, ValueError):
    """A message that no transport would take; nothing was published."""


class InvalidQueue(InvalidMessage):
    """A queue name that is empty, too long, or holds characters no database can keep."""


class InvalidPriority(InvalidMessage):
    """A priority outside 0..100."""


class InvalidTime(InvalidMessage):
    """A naive datetime, a negative delay, or two times that contradict each other."""


class BodyTooLarge(InvalidMessage):
    """The body, or the headers, exceed the limit of this transport."""


class BodyNotEncodable(InvalidMessage, TypeError):
    """The body is neither bytes nor text nor JSON."""


class BodyNotDecodable(MillpondError, ValueError):
    """The stored body is not what the handler's annotation says."""


# --- what the transport is, and is not ------------------------------------------------------------


class Unsupported(MillpondError):
    """This transport lacks the capability; the text names it."""


class Closed(MillpondError):
    """The transport was closed; connect again."""


class WrongConnection(MillpondError, TypeError):
    """`within=` was given something that cannot carry this store's writes in a transaction of the caller's."""


class LeaseLost(MillpondError):
    """The receipt is stale: the message was reaped, given back or settled by another. Nothing was written."""

    def __init__(self, receipts: Sequence[Receipt], message: str | None = None) -> None:
        self.receipts = tuple(receipts)
        ids = ", ".join(str(r.id) for r in self.receipts[:3]) + ("…" if len(self.receipts) > 3 else "")
        super().__init__(
            message
            or f"lease lost for message {ids}: another claim owns it now, and nothing was written; "
            "lengthen the lease or extend it while the handler runs"
        )


# --- streams --------------------------------------------------------------------------------------


class StreamError(MillpondError):
    """A Spark query cannot go on consuming its queues."""


class StreamFenced(StreamError):
    """Another driver opened the stream, or an operator released it: this one may write nothing more."""


class ClaimLost(StreamError):
    """A batch cannot be read again as it was, since its claim was released or its messages changed by hand."""


class StreamBehind(StreamError):
    """The checkpoint is older than what the stream has acknowledged, or belongs to another query."""


class UnknownStream(StreamError):
    """There is no stream of this name in the database."""


# --- bulk writes ----------------------------------------------------------------------------------


class BatchChanged(MillpondError):
    """A batch that was published in part came again with other rows in a part; nothing was published now."""


# --- the lake -------------------------------------------------------------------------------------


class LakeError(MillpondError):
    """Something is wrong with a lake, or with whose it is; nothing was written to it."""


class NoLake(LakeError):
    """There is no lake in this folder."""


class LakeFenced(LakeError):
    """Another export or compaction of the lake has begun since: this one has committed nothing, and may not."""


class LakeDamaged(LakeError):
    """The lake's log has a hole, a file is missing, or it is of a format that this version does not know."""


class WrongLake(LakeError):
    """The database was exported to another lake, or the lake is of another database: nothing was exported."""


# --- the database ---------------------------------------------------------------------------------


class StoreError(MillpondError):
    """Something between us and the database."""


class StoreBusy(StoreError):
    """Locks were held by others for longer than the bounded wait; call again."""

    retryable = True


class StoreUnavailable(StoreError):
    """The database cannot be reached, or the connection was lost for longer than the store waits."""

    retryable = True


class Unreachable(StoreUnavailable):
    """Nothing answers at this address."""


class AuthenticationFailed(StoreError):
    """The database refused the user or the password."""


class EncryptionFailed(StoreError):
    """No encrypted connection: the server's certificate is not trusted, or it offers no TLS."""


class UnknownDatabase(StoreError):
    """The server has no database of this name."""


class Unroutable(StoreError):
    """The broker has no queue that takes the message; it was not published."""


class QueueMismatch(StoreError):
    """The broker has a queue of this name with other settings."""


class StagingLost(StoreError):
    """Rows that a bulk write had loaded are gone before its commit; nothing was published, write the batch again."""

    retryable = True


class NotMigrated(StoreError):
    """The database has none of our tables, or older ones."""


class SchemaMismatch(StoreError):
    """The tables belong to another version of Millpond."""


def not_supported(what: str, capability: Any) -> Unsupported:
    return Unsupported(f"{what} is not possible on this transport: it lacks the capability {capability.name}")


def stream_behind(stream: str, seq: int, acked: int) -> StreamBehind:
    return StreamBehind(
        f"stream {stream!r}: the checkpoint is at claim {seq}, and the stream has acknowledged claim {acked}. The "
        "checkpoint is an old copy, or another query uses the same stream's name; going on would number new "
        "messages like old ones. Start from the newest checkpoint, or with a new stream's name"
    )


def claim_lost(stream: str, seq: int, expected: int, found: int) -> ClaimLost:
    return ClaimLost(
        f"stream {stream!r}: claim {seq} held {expected:,} messages, and now holds {found:,}: it was released, or "
        "changed by hand. What was given back will be delivered again, whether the sink has it or not. To go on "
        "with what is there, start the query with failOnDataLoss=false"
    )
