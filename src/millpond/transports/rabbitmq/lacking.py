"""What a broker cannot do, each with the capability that it lacks: said, never left out in silence."""

from __future__ import annotations

from typing import Any, NoReturn

from millpond.errors import not_supported
from millpond.transport import Capability


def _lacks(verb: str, capability: Capability) -> Any:
    async def lacking(self: Any, *args: Any, **options: Any) -> NoReturn:
        raise not_supported(f"{verb} on RabbitMQ", capability)

    return lacking


def _lacks_sync(verb: str) -> Any:
    def lacking(self: Any, *args: Any, **options: Any) -> NoReturn:
        raise not_supported(f"{verb} on RabbitMQ", Capability.TRANSACTIONS)

    return lacking


class Lacking:
    """The verbs of a store that need a database."""

    publish_sync = _lacks_sync("publish_sync(within=…)")
    settle_sync = _lacks_sync("settle_sync(within=…)")
    once_sync = _lacks_sync("once_sync")
    once = _lacks("once", Capability.TRANSACTIONS)
    count = _lacks("count", Capability.BROWSE)
    browse = _lacks("browse", Capability.BROWSE)
    find = _lacks("find", Capability.BROWSE)
    archived = _lacks("archived", Capability.ARCHIVE)
    record = _lacks("record", Capability.ARCHIVE)
    retain = _lacks("retain", Capability.ARCHIVE)
    purge = _lacks("purge", Capability.ARCHIVE)
    replay = _lacks("replay", Capability.ARCHIVE)
    reschedule = _lacks("reschedule", Capability.RESCHEDULE)
    cancel = _lacks("cancel", Capability.RESCHEDULE)
    pause = _lacks("pause", Capability.PAUSE)
    resume = _lacks("resume", Capability.PAUSE)
    join = _lacks("join", Capability.PRESENCE)
    open_stream = _lacks("open_stream", Capability.STREAMS)
    claim_for_stream = _lacks("claim_for_stream", Capability.STREAMS)
    stream_claim = _lacks("stream_claim", Capability.STREAMS)
    ack_stream = _lacks("ack_stream", Capability.STREAMS)
    record_outcomes = _lacks("record_outcomes", Capability.STREAMS)
    release_stream = _lacks("release_stream", Capability.STREAMS)
    streams = _lacks("streams", Capability.STREAMS)
    waiting = _lacks("waiting", Capability.STREAMS)
