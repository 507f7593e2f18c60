"""Log formats of a worker: text lines, or one JSON object per line.

Both add the ids of the message: the one whose handler logs, or the one that the worker names in the record. Millpond
never logs bodies or headers, and masks the passwords of all URLs of the pond in every line.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from enum import StrEnum
from typing import Any

from rich.console import Console
from rich.text import Text

from millpond.cli.table import plain
from millpond.redaction import redaction
from millpond.worker import current_delivery

_ABOUT = ("queue", "message_id", "correlation_id")
_STANDARD = {*vars(logging.makeLogRecord({})), "message", "asctime", "taskName"}
_LONGEST = 200
"""Characters of a field. Any publisher can write the header of `correlation_id`."""
_STYLES = {"DEBUG": "dim", "INFO": "green", "WARNING": "yellow", "ERROR": "red", "CRITICAL": "bold red"}


class LogFormat(StrEnum):
    TEXT = "text"
    JSON = "json"


def configure(
    form: LogFormat,
    level: str,
    console: Console,
    *,
    secrets: Sequence[str] = (),
    worker: int | None,
    redact: Callable[[str], str] | None = None,
) -> None:
    """Send all log records of this process to the console, and to no other handler."""
    kind = _JsonHandler if form == LogFormat.JSON else _TextHandler
    handler = kind(console, redaction(secrets, redact), worker)
    logging.basicConfig(handlers=[handler], level=level.upper(), force=True)
    logging.getLogger("millpond").setLevel(logging.NOTSET)
    logging.captureWarnings(True)


def message_fields(record: logging.LogRecord) -> dict[str, str]:
    """Queue and ids of the message that the record belongs to; empty if there is none."""
    fields = {name: str(value) for name in _ABOUT if (value := getattr(record, name, None)) is not None}
    delivery = current_delivery()
    if delivery is not None and "message_id" not in fields:
        own = {"queue": delivery.queue, "message_id": str(delivery.id), "correlation_id": delivery.correlation_id}
        fields = own | fields
    return {name: text if len(text) <= _LONGEST else text[:_LONGEST] + "…" for name, text in fields.items()}


class _Handler(logging.Handler):
    def __init__(self, console: Console, redact: Callable[[str], str], worker: int | None) -> None:
        super().__init__()
        self._console = console
        self.redact = redact
        self._worker = worker

    def emit(self, record: logging.LogRecord) -> None:
        try:
            self.write(record)
        except Exception:
            self.handleError(record)

    def write(self, record: logging.LogRecord) -> None:
        raise NotImplementedError

    def _trace(self, record: logging.LogRecord) -> str | None:
        if record.exc_info and record.exc_info[0] is not None:
            return self.redact(logging.Formatter().formatException(record.exc_info))
        return None


class _TextHandler(_Handler):
    """`12:34:56 WARNING  ship failed on …  [orders 0190…]`"""

    def write(self, record: logging.LogRecord) -> None:
        time = datetime.fromtimestamp(record.created).strftime("%H:%M:%S")
        line = Text()
        line.append(f"{time} ", "dim")
        if self._worker is not None:
            line.append(f"{self._worker:>2} ", "dim")
        line.append(f"{record.levelname:<8} ", _STYLES.get(record.levelname, ""))
        line.append(self.redact(record.getMessage()))
        facts = message_fields(record)
        if facts and facts.get("message_id", "") not in line.plain:
            line.append("  [" + " ".join(map(plain, dict.fromkeys(facts.values()))) + "]", "dim")
        if trace := self._trace(record):
            line.append("\n" + trace, "dim")
        self._console.print(line, soft_wrap=True, highlight=False)


class _JsonHandler(_Handler):
    def write(self, record: logging.LogRecord) -> None:
        fields: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": self.redact(record.getMessage()),
            "process": record.process,
        }
        if self._worker is not None:
            fields["worker"] = self._worker
        fields.update(message_fields(record))
        for name, value in vars(record).items():
            if name not in _STANDARD and name not in fields:
                fields[name] = self.redact(value) if isinstance(value, str) else value
        if trace := self._trace(record):
            fields["exception"] = trace
        text = json.dumps(fields, ensure_ascii=False, default=lambda value: self.redact(str(value)))
        # One write per line: lines of several processes must not mix.
        self._console.file.write(text + "\n")
        self._console.file.flush()
