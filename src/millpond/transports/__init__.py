"""Where URLs become transports. The only table that maps names to backends; each is imported when used."""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import Any

from millpond.errors import MissingDriver, UnknownScheme, not_supported
from millpond.telemetry import Telemetry
from millpond.transport import Capability, Store, Transport
from millpond.transports.observed import Observed
from millpond.transports.url import Url

_SCHEMES = {
    "memory": ("millpond.transports.memory", None),
    "sqlite": ("millpond.transports.database.sqlite", None),
    "postgresql": ("millpond.transports.database.postgres", "postgres"),
    "postgres": ("millpond.transports.database.postgres", "postgres"),
    "mysql": ("millpond.transports.database.mysql", "mysql"),
    "mariadb": ("millpond.transports.database.mysql", "mysql"),
    "amqp": ("millpond.transports.rabbitmq", "rabbitmq"),
    "amqps": ("millpond.transports.rabbitmq", "rabbitmq"),
}
"""Scheme -> (module with `connect`, and `dialect` if it is a database; extra that installs its driver)."""


async def connect(url: str, *, telemetry: Telemetry | None = None, **options: Any) -> Transport:
    """Open a transport: `sqlite:///orders.db`, `postgresql://…`, `mysql://…`, `mariadb://…`, `amqp://…`, `memory://`.

    What passes through it is announced to `telemetry`. Other options are those of the backend; an unknown one
    is an error. See docs/reference/options.md.
    """
    parsed = Url(url)
    transport: Transport = await _backend(parsed).connect(parsed, **options)
    return transport if telemetry is None else Observed(transport, telemetry)


def check(url: str, **options: Any) -> None:
    """Say what is wrong with a URL or an option, without connecting."""
    if is_database(url):
        _database(url, options)


def is_database(url: str) -> bool:
    return hasattr(_backend(Url(url)), "dialect")


def detached(url: str, **options: Any) -> Store:
    """A store that never connects: for `publish_sync` and `settle_sync` on the caller's own connection."""
    parsed, dialect, checked = _database(url, options)
    module = importlib.import_module("millpond.transports.database.detached")
    store: Store = module.detached(dialect, checked, parsed)
    return store


def ddl(url: str, **options: Any) -> str:
    """The tables of a store as one SQL script, for people who manage their schema themselves."""
    _, dialect, _ = _database(url, options)
    script: str = importlib.import_module("millpond.transports.database.migrate").ddl(dialect)
    return script


def _backend(url: Url) -> ModuleType:
    try:
        module_name, extra = _SCHEMES[url.scheme]
    except KeyError:
        known = ", ".join(f"{scheme}://" for scheme in _SCHEMES)
        raise UnknownScheme(f"no transport for {url.scheme}:// URLs; there are {known}") from None
    try:
        return importlib.import_module(module_name)
    except ModuleNotFoundError as e:
        if extra is None or (e.name or "").startswith("millpond"):
            raise
        raise MissingDriver(
            f'{url.scheme}:// needs the package {e.name}; install it with: pip install "millpond[{extra}]"'
        ) from e


def _database(url: str, options: dict[str, Any]) -> tuple[Url, Any, Any]:
    parsed = Url(url)
    module = _backend(parsed)
    if not hasattr(module, "dialect"):
        raise not_supported(f"a transaction of yours, or a schema, with {parsed.scheme}://", Capability.TRANSACTIONS)
    checked = importlib.import_module("millpond.transports.database.options").parse(options)
    return parsed, module.dialect(checked), checked
