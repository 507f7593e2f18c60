"""URLs that never show their password, and what may stand behind their `?`."""

from __future__ import annotations

import difflib
import os
from collections.abc import Sequence
from urllib.parse import parse_qsl, unquote, urlsplit

from millpond.errors import InvalidURL


class Url:
    """A parsed URL. Its text is masked; only `raw` and `password` tell the secret."""

    def __init__(self, raw: str) -> None:
        if not isinstance(raw, str) or "://" not in raw:
            raise InvalidURL("a URL such as sqlite:///orders.db or postgresql://user:password@host/database is needed")
        self.raw = raw
        try:
            parts = urlsplit(raw)
            self.port = parts.port
        except ValueError:
            raise InvalidURL(
                f"the {raw.split(':', 1)[0]} URL cannot be read: check its port and brackets, and write special "
                "characters of user and password as %40 for @, %2F for /, %3F for ?, %23 for #, %3A for :"
            ) from None
        if parts.netloc and "@" in raw.partition(parts.netloc)[2]:
            # Somewhere in there is the rest of a password; whatever is shown of such a URL might tell it.
            raise InvalidURL(
                f"the {parts.scheme} URL has an @ behind its host: write special characters of user and password "
                "as %40 for @, %2F for /, %3F for ?, %23 for #, %3A for :"
            )
        self.scheme = parts.scheme.lower()
        self.host = parts.hostname
        self.user = unquote(parts.username) if parts.username is not None else None
        self.password = unquote(parts.password) if parts.password is not None else None
        self.path = unquote(parts.path)
        self.query = dict(parse_qsl(parts.query, keep_blank_values=True))
        self._netloc = parts.netloc.rpartition("@")[2]

    def __str__(self) -> str:
        login = "" if self.user is None else f"{self.user}{':***' if self.password is not None else ''}@"
        return f"{self.scheme}://{login}{self._netloc}{self.path}"

    def __repr__(self) -> str:
        return f"Url({str(self)!r})"


def check_parameters(url: Url, known: Sequence[str], *, files: Sequence[str] = ()) -> None:
    """Refuse what stands behind the `?` of a URL and means nothing, or names a file that is not there."""
    for name, value in url.query.items():
        if name not in known:
            near = difflib.get_close_matches(name, known, 1)
            hint = f"did you mean {near[0]!r}?" if near else f"there are {', '.join(known) or 'none'}"
            raise InvalidURL(f"the URL {url} has the unknown parameter {name!r}; {hint}")
        if name in files and not os.path.isfile(value):
            raise InvalidURL(f"{name} of the URL {url} names a file that does not exist: {value}")
