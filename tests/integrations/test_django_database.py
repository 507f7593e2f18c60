"""The URL of a database in Django's settings."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from millpond.integrations.django import database
from millpond.transports import check

FACTS = {"NAME": "shop", "USER": "", "PASSWORD": "", "HOST": "", "PORT": "", "OPTIONS": {}}


@pytest.mark.parametrize(
    ("vendor", "facts", "url"),
    [
        ("postgresql", {"USER": "u", "PASSWORD": "p@:/", "HOST": "db", "PORT": 5433}, "u:p%40%3A%2F@db:5433/shop"),
        ("postgresql", {"USER": "u"}, "u@/shop"),
        ("postgresql", {"USER": "u", "HOST": "/var/run/postgresql"}, "u@/shop?host=/var/run/postgresql"),
        ("postgresql", {"HOST": "/tmp", "PORT": "5433"}, "/shop?host=/tmp&port=5433"),
        ("postgresql", {"HOST": "::1", "OPTIONS": {"sslmode": "require", "pool": True}}, "[::1]/shop?sslmode=require"),
        ("postgresql", {"OPTIONS": {"options": "-c search_path=a"}}, "/shop?options=-c%20search_path%3Da"),
        ("mysql", {"USER": "u", "HOST": "/run/mysqld/s.sock"}, "u@localhost/shop?unix_socket=/run/mysqld/s.sock"),
        ("mysql", {"OPTIONS": {"unix_socket": "/s", "charset": "utf8mb4"}}, "localhost/shop?unix_socket=/s"),
        ("mysql", {"HOST": "db", "OPTIONS": {"ssl": {"ca": "/etc/ca.pem"}}}, "db/shop?ssl_ca=/etc/ca.pem"),
    ],
)
def test_the_url_of_djangos_settings(
    vendor: str, facts: dict[str, Any], url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    connection = SimpleNamespace(vendor=vendor, settings_dict={**FACTS, **facts})
    monkeypatch.setattr(database, "connections", {"default": connection})
    found = database.database_url("default")
    assert found == f"{vendor}://{url}"
    if "ssl_ca" not in found:  # that file does not exist
        check(found)
