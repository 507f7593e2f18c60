"""The database of the messages, as Django's settings describe it: its URL and options."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from urllib.parse import quote, urlencode

from django.conf import settings
from django.db import connections

from millpond.errors import InvalidOption

_SCHEMES = {"sqlite": "sqlite", "postgresql": "postgresql", "mysql": "mysql"}
_POSTGRESQL = (
    *("sslmode", "sslrootcert", "sslcert", "sslkey", "sslpassword", "sslcrl", "passfile", "service"),
    *("target_session_attrs", "application_name", "options"),
)
"""Entries of OPTIONS that choose the server, the login or the session; the others concern Django's driver only."""

_MYSQL_TLS = ("ca", "cert", "key")


_configured: str | None = None
"""Name of the database when Django was set up, before tests change it. None: the app is not installed."""


def remember_configured() -> None:
    """Called while Django is set up."""
    global _configured
    _configured = str(settings.DATABASES.get(alias(), {}).get("NAME"))


def is_test_database() -> bool:
    """Whether Django's test runner made this database: its name is no longer the configured one."""
    return _configured is not None and str(connections[alias()].settings_dict["NAME"]) != _configured


def alias() -> str:
    """The database of the messages in `DATABASES`."""
    return str(getattr(settings, "MILLPOND", {}).get("DATABASE", "default"))


def options() -> dict[str, Any]:
    return dict(getattr(settings, "MILLPOND", {}).get("OPTIONS", {}))


def is_in_memory() -> bool:
    """Whether the database is SQLite in memory, as in Django's tests by default."""
    connection = connections[alias()]
    return bool(connection.vendor == "sqlite" and connection.is_in_memory_db())


def database_url(using: str | None = None) -> str:
    """The URL of a database of Django; of the test's database while tests run."""
    connection = connections[using or alias()]
    facts = connection.settings_dict
    scheme = _SCHEMES.get(connection.vendor)
    if scheme is None:
        raise InvalidOption(f"Millpond has no store for Django's {connection.vendor}; use SQLite, PostgreSQL or MySQL")
    name = str(facts["NAME"] or "")
    if scheme == "sqlite":
        return f"sqlite:///{quote(name)}"
    login = quote(str(facts["USER"]), safe="")
    if facts["PASSWORD"]:
        login += ":" + quote(str(facts["PASSWORD"]), safe="")
    query = _query(scheme, facts["OPTIONS"])
    host, port = str(facts["HOST"]), str(facts["PORT"] or "")
    if host.startswith("/") and scheme == "postgresql":  # the folder of a socket; the port is a part of its name
        query |= {"host": host} | ({"port": port} if port else {})
        host, port = "", ""
    elif scheme == "mysql" and (host.startswith("/") or not host):
        query |= {"unix_socket": host} if host else {}
        host = "localhost"
    place = f"[{host}]" if ":" in host else host
    parts = f"{login + '@' if login else ''}{place}{':' + port if port else ''}/{quote(name, safe='')}"
    return f"{scheme}://{parts}" + (f"?{urlencode(query, quote_via=quote, safe='/')}" if query else "")


def _query(scheme: str, given: Mapping[str, Any]) -> dict[str, str]:
    if scheme == "postgresql":
        return {name: str(given[name]) for name in _POSTGRESQL if given.get(name)}
    files = {f"ssl_{name}": str(path) for name, path in (given.get("ssl") or {}).items() if name in _MYSQL_TLS}
    return files | ({"unix_socket": str(given["unix_socket"])} if given.get("unix_socket") else {})
