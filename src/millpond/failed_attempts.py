"""Attempts that failed, as they are kept with a message, and the fingerprint by which failures are grouped.

The database keeps one line for each: the times of claim and result in microseconds, then the rest as JSON. It cuts the
oldest ones when there are too many. A message that succeeds at its first attempt has none.
"""

from __future__ import annotations

import os
import re
import traceback
from collections.abc import Callable
from datetime import datetime
from types import TracebackType

import msgspec

from millpond import clock

HISTORY_LIMIT = 20_000
"""Maximum number of characters of all attempts of a message."""
ERROR_IN_HISTORY = 500
TRACEBACK_LIMIT = 4000
"""Maximum number of characters of one traceback: its end, where the error is."""
_FINGERPRINTED = 300
_WORKER = os.path.join(os.path.dirname(__file__), "worker", "")

_VARIABLE = re.compile(
    r"0x[0-9a-fA-F]+|[0-9a-fA-F]{8}-(?:[0-9a-fA-F]{4}-){3}[0-9a-fA-F]{12}|\d+|'[^'\n]{0,200}'|\"[^\"\n]{0,200}\""
)


class Attempt(msgspec.Struct, frozen=True, kw_only=True):
    """An attempt of a message that failed."""

    claimed_us: int
    ended_us: int
    error: str | None = None
    traceback: str | None = None
    took: float | None = None
    """Seconds that the handler ran; None: unknown."""

    @property
    def claimed_at(self) -> datetime:
        return clock.as_datetime(self.claimed_us)

    @property
    def ended_at(self) -> datetime:
        return clock.as_datetime(self.ended_us)


class _Stored(msgspec.Struct, omit_defaults=True):
    error: str | None = None
    traceback: str | None = None
    took: float | None = None


def stored_attempt(error: str | None, traceback: str | None, took: float | None) -> str:
    """One attempt as it is stored, without its times: the database adds them by its own clock."""
    short = None if error is None else error[:ERROR_IN_HISTORY].replace("\x00", "�")
    end = None if traceback is None else traceback[-TRACEBACK_LIMIT:].replace("\x00", "�")
    rounded = None if took is None else round(took, 6)
    try:
        return msgspec.json.encode(_Stored(short, end, rounded)).decode()
    except (UnicodeError, msgspec.MsgspecError):  # half of a surrogate pair
        return msgspec.json.encode(_Stored(_as_text(short), _as_text(end), rounded)).decode()


def _as_text(text: str | None) -> str | None:
    return None if text is None else text.encode(errors="replace").decode()


_decode: Callable[[str], _Stored] = msgspec.json.Decoder(_Stored).decode


def attempts(history: str | None) -> list[Attempt]:
    """Stored attempts, oldest first. A line that was cut, or that another program wrote, is left out."""
    found = []
    for line in (history or "").split("\n"):
        try:
            claimed, ended, rest = line.split(" ", 2)
            kept = _decode(rest)
            found.append(
                Attempt(
                    claimed_us=int(claimed),
                    ended_us=int(ended),
                    error=kept.error,
                    traceback=kept.traceback,
                    took=kept.took,
                )
            )
        except (ValueError, msgspec.MsgspecError):
            continue
    return found


def fingerprint(reason: str | None, error: str | None) -> int:
    """The same number for failures that differ only in numbers, ids and quoted values: 63 bits."""
    import hashlib  # loads OpenSSL, which programs that only publish do not need

    text = "\n".join(_VARIABLE.sub("#", (part or "")[:_FINGERPRINTED]) for part in (reason, error))
    digest = hashlib.blake2b(text.encode(errors="replace"), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


def trace_of_handler(error: BaseException) -> TracebackType | None:
    """The trace of an error without the frames of the worker above the handler."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None and trace.tb_frame.f_code.co_filename.startswith(_WORKER):
        trace = trace.tb_next
    return trace


def traceback_text(error: BaseException) -> str | None:
    """The traceback of an error for storage; None if it has none, or cannot be formatted."""
    if error.__traceback__ is None:
        return None
    try:
        text = "".join(traceback.format_exception(type(error), error, trace_of_handler(error), limit=-20, chain=True))
    except KeyboardInterrupt:
        raise
    except BaseException:
        return None
    return text[-TRACEBACK_LIMIT:]
