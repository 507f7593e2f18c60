"""Operator verbs, each defined once, and a message as JSON. The command line and the server are faces of this."""

from __future__ import annotations

from millpond.control.control import Control, QueueView, Retried
from millpond.control.lag import StreamView
from millpond.control.message_json import body, facts
from millpond.control.search import Choice, Page, Preview
from millpond.control.why import Reason, Why

__all__ = [
    "Choice",
    "Control",
    "Page",
    "Preview",
    "QueueView",
    "Reason",
    "Retried",
    "StreamView",
    "Why",
    "body",
    "facts",
]
