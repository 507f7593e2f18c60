"""URLs of a command: read from files, and hidden in its errors.

Arguments of a process are visible to every user of the machine. A URL with a password belongs into an environment
variable, or into a file that is given as @FILE.
"""

from __future__ import annotations

from pathlib import Path

from millpond.errors import InvalidURL
from millpond.redaction import hide
from millpond.transports.url import Url

_secrets: set[str] = set()
"""Passwords in the URLs of this command."""


def resolve(given: str | None) -> str | None:
    """The URL, or with @FILE the content of a file. Its secrets are hidden from now on."""
    if given is None:
        return None
    if given.startswith("@"):
        try:
            given = Path(given[1:]).read_text(encoding="utf-8").strip()
        except (OSError, ValueError) as e:
            raise InvalidURL(f"the URL cannot be read from {given}: {getattr(e, 'strerror', None) or e}") from None
    for raw in given.split():  # several for shards
        if "://" in raw:
            _secrets.update(Url(raw).secrets)
    return given


def hide_secrets(text: str) -> str:
    return hide(text, _secrets)


def forget() -> None:
    _secrets.clear()
