"""Millpond: the database you already run, as a durable message queue."""

from millpond.clock import ManualClock
from millpond.errors import LeaseLost, MillpondError, StoreBusy, StoreUnavailable, Unsupported
from millpond.message import Claim, Message, Published, Receipt, State, id_from
from millpond.outcome import Ack, AckPolicy, GiveBack, Nack, NackMessage, Outcome, Reject, RejectMessage
from millpond.pond import Millpond
from millpond.retry import Retry
from millpond.subscribers import Subscribers
from millpond.transport import Capability, QueueStats, Row, Store, Transport
from millpond.transports import connect
from millpond.worker import Delivery, current_delivery

__all__ = [
    "Ack",
    "AckPolicy",
    "Capability",
    "Claim",
    "Delivery",
    "GiveBack",
    "LeaseLost",
    "ManualClock",
    "Message",
    "Millpond",
    "MillpondError",
    "Nack",
    "NackMessage",
    "Outcome",
    "Published",
    "QueueStats",
    "Receipt",
    "Reject",
    "RejectMessage",
    "Retry",
    "Row",
    "State",
    "Store",
    "StoreBusy",
    "StoreUnavailable",
    "Subscribers",
    "Transport",
    "Unsupported",
    "connect",
    "current_delivery",
    "id_from",
]
