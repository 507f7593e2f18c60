"""URLs that never show their password."""

from __future__ import annotations

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
