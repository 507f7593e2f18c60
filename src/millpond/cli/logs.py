"""Logs of a worker: lines for people, or one JSON object a line for programs.

Both tell which message a line is about: that of the handler that logs, or the one that the worker names. Bodies
and headers are never logged by Millpond, and the password of the pond's URL is blotted out wherever it turns up.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any, Literal

from rich.console import Console
from rich.text import Text

from millpond.worker import current_delivery

Format = Literal["text", "json"]

_ABOUT = ("queue", "message_id", "correlation_id")
_STANDARD = {*vars(logging.makeLogRecord({})), "message", "asctime", "taskName"}
_STYLES = {"DEBUG": "dim", "INFO": "green", "WARNING": "yellow", "ERROR": "red", "CRITICAL": "bold red"}
_TOO_SHORT_TO_BLOT = 4


def configure(form: Format, level: str, console: Console, *, secrets: Sequence[str], worker: int | None) -> None:
    """Let everything that is logged in this process go to the console, and nowhere else."""
    handler: logging.Handler
    handler = _JsonHandler(console, worker) if form == "json" else _TextHandler(console, worker)
    handler.secrets = [secret for secret in secrets if len(secret) >= _TOO_SHORT_TO_BLOT]
    logging.basicConfig(handlers=[handler], level=level.upper(), force=True)
    logging.getLogger("millpond").setLevel(logging.NOTSET)
    logging.captureWarnings(True)


def about(record: logging.LogRecord) -> dict[str, str]:
    """Which message a record is about; empty if it is about none."""
    named = {name: str(value) for name in _ABOUT if (value := getattr(record, name, None)) is not None}
    delivery = current_delivery()
    if delivery is None or "message_id" in named:
        return named
    return {
        "queue": delivery.queue,
        "message_id": str(delivery.id),
        "correlation_id": delivery.correlation_id,
        **named,
    }


class _Handler(logging.Handler):
    secrets: Sequence[str] = ()

    def __init__(self, console: Console, worker: int | None) -> None:
        super().__init__()
        self._console = console
        self._worker = worker

    def _blotted(self, text: str) -> str:
        for secret in self.secrets:
            text = text.replace(secret, "***")
        return text

    def emit(self, record: logging.LogRecord) -> None:
        try:
            self.write(record)
        except Exception:
            self.handleError(record)

    def write(self, record: logging.LogRecord) -> None:
        raise NotImplementedError

    def trace(self, record: logging.LogRecord) -> str | None:
        if record.exc_info and record.exc_info[0] is not None:
            return logging.Formatter().formatException(record.exc_info)
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
        line.append(self._blotted(record.getMessage()))
        facts = about(record)
        if facts and facts.get("message_id", "") not in line.plain[:]:
            line.append("  [" + " ".join(dict.fromkeys(facts.values())) + "]", "dim")
        trace = self.trace(record)
        if trace:
            line.append("\n" + self._blotted(trace), "dim")
        self._console.print(line, soft_wrap=True, highlight=False)


class _JsonHandler(_Handler):
    def write(self, record: logging.LogRecord) -> None:
        fields: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": self._blotted(record.getMessage()),
            "process": record.process,
        }
        if self._worker is not None:
            fields["worker"] = self._worker
        fields.update(about(record))
        for name, value in vars(record).items():
            if name not in _STANDARD and name not in fields:
                fields[name] = self._blotted(value) if isinstance(value, str) else value
        trace = self.trace(record)
        if trace:
            fields["exception"] = self._blotted(trace)
        text = json.dumps(fields, ensure_ascii=False, default=lambda value: self._blotted(str(value)))
        # One write a line, so that the lines of several processes do not mix.
        self._console.file.write(text + "\n")
        self._console.file.flush()
