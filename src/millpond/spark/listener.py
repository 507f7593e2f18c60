"""Progress of streaming queries as telemetry: messages, messages still waiting, and duration.

spark.streams.addListener(StreamListener(telemetry))
"""

from __future__ import annotations

from typing import Any

import msgspec
from pyspark.sql.streaming.listener import (
    QueryIdleEvent,
    QueryProgressEvent,
    QueryStartedEvent,
    QueryTerminatedEvent,
    StreamingQueryListener,
)

from millpond.telemetry import Streamed, Telemetry


class StreamListener(StreamingQueryListener):
    """Emits an event for every trigger of every query that reads one of our streams."""

    def __init__(self, telemetry: Telemetry) -> None:
        self._telemetry = telemetry

    def onQueryProgress(self, event: QueryProgressEvent) -> None:
        progress = event.progress
        for source in progress.sources:
            end, latest = _offset(source.endOffset), _offset(source.latestOffset)
            if "stream" in end and "seq" in end:
                seconds = progress.durationMs.get("triggerExecution", 0) / 1000
                waiting = int(latest.get("waiting", 0))
                self._telemetry.announce(Streamed(end["stream"], source.numInputRows, waiting, seconds))

    def onQueryStarted(self, event: QueryStartedEvent) -> None: ...

    def onQueryIdle(self, event: QueryIdleEvent) -> None: ...

    def onQueryTerminated(self, event: QueryTerminatedEvent) -> None: ...


def _offset(text: Any) -> dict[str, Any]:
    """Our offset, or nothing: offsets of other sources may have any form."""
    try:
        return msgspec.json.decode(text or "{}", type=dict[str, Any])
    except (msgspec.DecodeError, TypeError):
        return {}
