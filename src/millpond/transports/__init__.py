"""Where URLs become transports. The only table that maps names to backends; each is imported when used."""

from __future__ import annotations

import importlib
from typing import Any

from millpond.errors import MissingDriver, UnknownScheme
from millpond.transport import Transport
from millpond.transports.url import Url

_SCHEMES = {
    "memory": ("millpond.transports.memory", None),
    "sqlite": ("millpond.transports.database.sqlite", None),
    "postgresql": ("millpond.transports.database.postgres", "postgres"),
    "postgres": ("millpond.transports.database.postgres", "postgres"),
    "mysql": ("millpond.transports.database.mysql", "mysql"),
    "mariadb": ("millpond.transports.database.mysql", "mysql"),
}
"""Scheme -> (module with `connect`, extra that installs its driver)."""


async def connect(url: str, **options: Any) -> Transport:
    """Open a transport: `sqlite:///orders.db`, `postgresql://…`, `mysql://…`, `mariadb://…`, `memory://`.

    Options are those of the backend; an unknown one is an error. See docs/reference/options.md.
    """
    parsed = Url(url)
    try:
        module_name, extra = _SCHEMES[parsed.scheme]
    except KeyError:
        known = ", ".join(f"{scheme}://" for scheme in _SCHEMES)
        raise UnknownScheme(f"no transport for {parsed.scheme}:// URLs; there are {known}") from None
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as e:
        if extra is None or (e.name or "").startswith("millpond"):
            raise
        raise MissingDriver(
            f'{parsed.scheme}:// needs the package {e.name}; install it with: pip install "millpond[{extra}]"'
        ) from e
    transport: Transport = await module.connect(parsed, **options)
    return transport
