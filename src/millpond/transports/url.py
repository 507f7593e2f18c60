"""URLs that never show their password, and a check of their parameters."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

from millpond.checks import unknown_option
from millpond.errors import InvalidURL
from millpond.redaction import forms, hide

_SEVERAL_HOSTS = ("amqp", "amqps")
_SECRET_PARAMETERS = ("password", "sslpassword")
_WITH_DRIVERS = ("postgresql", "mysql", "mariadb", "sqlite")
"""Schemes behind which SQLAlchemy's URLs name a driver: postgresql+asyncpg://. Millpond has its own drivers."""


class Url:
    """A parsed URL. Its text is masked; only `raw`, `each_host`, `password`, `query` and `secrets` have secrets."""

    def __init__(self, raw: str) -> None:
        from urllib.parse import parse_qsl, unquote, unquote_plus, urlsplit  # not for programs that only declare

        if not isinstance(raw, str) or "://" not in raw:
            raise InvalidURL(_no_url(raw))
        scheme, driver, rest = _split_driver(raw)
        if driver and scheme.lower() in _WITH_DRIVERS:
            raw = scheme + rest
        self.raw = raw
        """The URL as it was given, without the name of a driver."""
        try:
            parts = urlsplit(raw)
            login, at, places = parts.netloc.rpartition("@")
            several = places.split(",") if parts.scheme.lower() in _SEVERAL_HOSTS else [places]
            hosts = [urlsplit(f"//{place}") for place in several]
            if len(hosts) > 1 and not all(host.hostname for host in hosts):
                raise ValueError
            self.port, *_ = [host.port for host in hosts]
        except ValueError:
            raise InvalidURL(
                f"the {raw.split(':', 1)[0]} URL cannot be read: check its port and brackets, and write special "
                "characters of user and password as %40 for @, %2F for /, %3F for ?, %23 for #, %3A for :"
            ) from None
        if parts.netloc and "@" in raw.partition(parts.netloc)[2]:
            # The rest of a password is behind the host: any part of such a URL that is shown may contain it.
            raise InvalidURL(
                f"the {parts.scheme} URL has an @ behind its host: write special characters of user and password "
                "as %40 for @, %2F for /, %3F for ?, %23 for #, %3A for :"
            )
        self.scheme = parts.scheme.lower()
        self.host = ",".join(host.hostname or "" for host in hosts) or None
        """Name of the host, or names with commas."""
        self.each_host = [parts._replace(netloc=login + at + place).geturl() for place in several]
        """The raw URL, once for each host."""
        self.user = unquote(parts.username) if parts.username is not None else None
        self.password = unquote(parts.password) if parts.password is not None else None
        self.path = unquote(parts.path)
        self.query = dict(parse_qsl(parts.query, keep_blank_values=True))
        self._netloc = places
        found = forms(self.password or "", parts.password or "")
        for part in parts.query.split("&"):
            name, _, written = part.partition("=")
            if unquote(name).lower() in _SECRET_PARAMETERS:
                found |= forms(unquote(written), unquote_plus(written), written)
        self.secrets = tuple(found)
        """Passwords in the URL, each in all the forms in which an error text may repeat it."""

    def __str__(self) -> str:
        login = "" if self.user is None else f"{self.user}{':***' if self.password is not None else ''}@"
        return f"{self.scheme}://{login}{self._netloc}{self.path}"

    def hide(self, error: object) -> str:
        """The text of a driver's error, without secrets of this URL."""
        return hide(str(error).strip(), self.secrets)

    def __repr__(self) -> str:
        return f"Url({str(self)!r})"


def _no_url(given: object) -> str:
    if hasattr(given, "render_as_string"):  # its str() has *** for the password
        return "a URL must be text: give url.render_as_string(hide_password=False) for a URL of SQLAlchemy"
    return (
        "no URL: give one such as sqlite:///orders.db or postgresql://user:password@host/database, or memory:// for "
        "messages that end with the process"
    )


def _split_driver(raw: str) -> tuple[str, str, str]:
    """(scheme, driver, the rest from :// on)

    >>> _split_driver("postgresql+asyncpg://host/shop")
    ('postgresql', 'asyncpg', '://host/shop')
    """
    before, _, behind = raw.partition("://")
    scheme, _, driver = before.partition("+")
    return scheme, driver, f"://{behind}"


def check_parameters(
    url: Url, known: Sequence[str], *, files: Sequence[str] = (), elsewhere: Mapping[str, str] | None = None
) -> None:
    """Refuse unknown parameters of a URL, and those that name a file that does not exist.

    `elsewhere`: the names of other libraries, with ours.
    """
    for name, value in url.query.items():
        if name not in known and elsewhere is not None and name in elsewhere:
            raise InvalidURL(f"the URL {url} has the parameter {name!r} of another library; write {elsewhere[name]!r}")
        if name not in known:
            raise InvalidURL(unknown_option(name, known, f"the URL {url} has the unknown parameter"))
        if name in files and not os.path.isfile(value):
            raise InvalidURL(f"{name} of the URL {url} names a file that does not exist: {value}")
