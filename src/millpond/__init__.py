"""Millpond: a durable message queue in the database you already run."""

from typing import TYPE_CHECKING, Any

from millpond.clock import ManualClock
from millpond.errors import LeaseLost, MillpondError, StoreBusy, StoreUnavailable, Unsupported
from millpond.ids import PublishedId, id_from
from millpond.message import Claim, Message, Published, Receipt, State, Unique
from millpond.outcome import (
    Ack,
    AckPolicy,
    GiveBack,
    Nack,
    NackMessage,
    Outcome,
    Reject,
    RejectMessage,
    SnoozeMessage,
    StepHeld,
)
from millpond.pond import Millpond
from millpond.publishing import Publication, Publish
from millpond.retry import Retry
from millpond.seam.transport import Capability, Transport
from millpond.seam.workers import Step
from millpond.subscriber import Subscriber
from millpond.subscribers import Subscribers
from millpond.transports import connect
from millpond.worker import Delivery, Handling, current_delivery

__all__ = [
    "Ack",
    "AckPolicy",
    "Capability",
    "Claim",
    "Delivery",
    "GiveBack",
    "Handling",
    "LeaseLost",
    "ManualClock",
    "Message",
    "Millpond",
    "MillpondError",
    "Nack",
    "NackMessage",
    "Outcome",
    "Publication",
    "Publish",
    "Published",
    "PublishedId",
    "QueueStats",
    "Receipt",
    "Reject",
    "RejectMessage",
    "Retry",
    "Row",
    "SnoozeMessage",
    "State",
    "Step",
    "StepHeld",
    "StoreBusy",
    "StoreUnavailable",
    "Subscriber",
    "Subscribers",
    "Transport",
    "Unique",
    "Unsupported",
    "__version__",
    "connect",
    "current_delivery",
    "id_from",
]

if TYPE_CHECKING:
    from millpond.seam.operations import QueueStats, Row

    __version__: str


def __getattr__(name: str) -> Any:
    """Load what few programs need when it is asked for. The version takes longer than all the rest of this import."""
    if name in ("QueueStats", "Row"):
        from millpond.seam import operations

        return getattr(operations, name)
    if name == "__version__":
        from importlib import metadata

        return metadata.version("millpond")
    raise AttributeError(f"module 'millpond' has no attribute {name!r}")
